#include "ghost.h"

#include "arena.h"

int ghost_open(ghost *g, uint32_t n_records, uint32_t n_slots) {
    g->lists[0] = g->lists[1] = EMPTY_LIST;
    g->most = n_slots < UINT32_MAX / 2 ? 2 * n_slots : UINT32_MAX;
    g->links = memory_zeroed(n_records, sizeof *g->links);
    return g->links != NULL;
}

void ghost_close(ghost *g) {
    memory_free(g->links);
    g->links = NULL;
}

/* Takes the least recently used record out of a list of more than `most`, or NO_RECORD. */
static uint32_t take_surplus(ghost *g, const list *l) {
    const uint32_t record = l->first;
    if (l->n <= g->most) return NO_RECORD;
    list_take_out(g->links, record);
    return record;
}

int ghost_use(ghost *g, uint32_t record) {
    const list *was_in = g->links[record].in;
    if (was_in) list_take_out(g->links, record);
    list_append(&g->lists[0], g->links, record);
    const uint32_t moved = take_surplus(g, &g->lists[0]);
    if (moved != NO_RECORD) list_append(&g->lists[1], g->links, moved);
    take_surplus(g, &g->lists[1]);
    return !was_in ? 0 : was_in == &g->lists[0] ? 2 : 4;
}
