/* What the C tests share: a check that names its place and lets the rest run. */
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
