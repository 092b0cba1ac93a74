#include "list.h"

#include <stddef.h>

void list_append(list *l, list_link *links, uint32_t record) {
    links[record] = (list_link){.in = l, .before = l->last, .after = NO_RECORD};
    *(l->last == NO_RECORD ? &l->first : &links[l->last].after) = record;
    l->last = record;
    l->n++;
}

void list_take_out(list_link *links, uint32_t record) {
    list_link *link = &links[record];
    list *l = link->in;
    *(link->before == NO_RECORD ? &l->first : &links[link->before].after) = link->after;
    *(link->after == NO_RECORD ? &l->last : &links[link->after].before) = link->before;
    link->in = NULL;
    l->n--;
}
