#include "status.h"

#include <stdarg.h>
#include <stdio.h>

cflow_status fail(cflow_error *err, cflow_status status, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
    }
    return status;
}
