/* Lists of records, linked by index: every record is in one of several lists, or in none. */
#ifndef CFLOW_LIST_H
#define CFLOW_LIST_H

#include <stdint.h>

#define NO_RECORD UINT32_MAX

typedef struct {
    uint32_t first, last, n; /* records, NO_RECORD where it is empty */
} list;

#define EMPTY_LIST ((list){.first = NO_RECORD, .last = NO_RECORD})

typedef struct { /* of one record; zeroed: in no list */
    list *in;
    uint32_t before, after; /* NO_RECORD at an end */
} list_link;

/* links: (n_records,) shared by all lists they may be in. */
void list_append(list *l, list_link *links, uint32_t record);
/* From the list it is in. */
void list_take_out(list_link *links, uint32_t record);

#endif
