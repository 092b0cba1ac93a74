/* Doubly linked lists of records, named by index. A record is in one list or in none. */
#ifndef CFLOW_LIST_H
#define CFLOW_LIST_H

#include <stdint.h>

#define NO_RECORD UINT32_MAX

typedef struct {
    uint32_t first, last; /* NO_RECORD if the list is empty */
    uint32_t n;           /* records in it */
} list;

#define EMPTY_LIST ((list){.first = NO_RECORD, .last = NO_RECORD})

typedef struct { /* a record's place; zeroed: in no list */
    list *in;
    uint32_t before, after; /* neighbours, NO_RECORD at an end */
} list_link;

/* links (n_records,): one table for all lists that share the records. */
void list_append(list *l, list_link *links, uint32_t record);
/* Takes the record out of the list that it is in. */
void list_take_out(list_link *links, uint32_t record);

#endif
