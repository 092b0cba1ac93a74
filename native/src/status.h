/* Error texts. */
#ifndef CFLOW_STATUS_H
#define CFLOW_STATUS_H

#include "cflow.h"

/* Writes the text (as printf does, truncated to fit) to err unless that is NULL. Returns status. */
cflow_status fail(cflow_error *err, cflow_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
