/* CHECK: reports a failure with its place and lets the test go on. */
#ifndef CFLOW_EXPECT_H
#define CFLOW_EXPECT_H

#include <stdio.h>

static int failed;

#define CHECK(ok, ...)                                                                             \
    do {                                                                                           \
        if (!(ok)) {                                                                               \
            printf("FAIL %s:%d ", __func__, __LINE__);                                             \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            failed = 1;                                                                            \
        }                                                                                          \
    } while (0)

#endif
