/* The bandwidth probe: it gives a speed, whatever it is, or rejects its arguments. */
#include <string.h>

#include "cflow.h"
#include "expect.h"

static void refuses(uint64_t bytes, int32_t n_threads, int32_t passes, const char *text) {
    double speed = 1;
    cflow_error err = {{0}};
    CHECK(cflow_probe_bandwidth(&speed, bytes, n_threads, passes, &err) == CFLOW_EINVAL, "%s",
          text);
    CHECK(strstr(err.text, text) && speed == 0, "\"%s\" lacks \"%s\"", err.text, text);
}

int main(void) {
    double speed = 0;
    cflow_error err = {{0}};
    CHECK(cflow_probe_bandwidth(&speed, (8 << 20) + 1, 3, 2, &err) == CFLOW_OK, "%s", err.text);
    CHECK(speed > 0, "%g bytes per second", speed);
    refuses(4095, 1, 1, "4095 bytes");
    refuses(1 << 20, 0, 1, "0 threads");
    refuses(1 << 20, 1, 0, "0 passes");
    CHECK(cflow_probe_bandwidth(&speed, 1ull << 60, 1, 1, &err) == CFLOW_ENOMEM, "2^60 bytes");
    printf(failed ? "probe: failed\n" : "probe: ok\n");
    return failed;
}
