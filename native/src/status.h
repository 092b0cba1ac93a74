/* How a failing call says why. */
#ifndef CFLOW_STATUS_H
#define CFLOW_STATUS_H

#include "cflow.h"

/* Writes the text (printf form, cut to fit) into err if it is not NULL; returns status. */
cflow_status fail(cflow_error *err, cflow_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
