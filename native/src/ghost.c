#include "ghost.h"

#include "arena.h"

#define NONE UINT32_MAX

int ghost_open(ghost *g, uint32_t n_records, uint32_t n_slots) {
    const ghost_list empty = {.first = NONE, .last = NONE};
    g->lists[0] = g->lists[1] = empty;
    g->most = n_slots < UINT32_MAX / 2 ? 2 * n_slots : UINT32_MAX;
    g->links = memory_zeroed(n_records, sizeof *g->links);
    if (!g->links) return 0;
    for (uint32_t r = 0; r < n_records; r++) g->links[r].list = -1;
    return 1;
}

void ghost_close(ghost *g) {
    memory_free(g->links);
    g->links = NULL;
}

static void append(ghost *g, int list, uint32_t record) {
    ghost_list *l = &g->lists[list];
    g->links[record] = (ghost_link){.before = l->last, .after = NONE, .list = list};
    *(l->last == NONE ? &l->first : &g->links[l->last].after) = record;
    l->last = record;
    l->n++;
}

static void take_out(ghost *g, uint32_t record) {
    ghost_link *link = &g->links[record];
    ghost_list *l = &g->lists[link->list];
    *(link->before == NONE ? &l->first : &g->links[link->before].after) = link->after;
    *(link->after == NONE ? &l->last : &g->links[link->after].before) = link->before;
    link->list = -1;
    l->n--;
}

/* The least recently used record of a list that holds too many. */
static uint32_t take_surplus(ghost *g, int list) {
    const uint32_t record = g->lists[list].first;
    if (g->lists[list].n <= g->most) return NONE;
    take_out(g, record);
    return record;
}

int ghost_use(ghost *g, uint32_t record) {
    const int was = g->links[record].list;
    if (was >= 0) take_out(g, record);
    append(g, 0, record);
    const uint32_t moved = take_surplus(g, 0);
    if (moved != NONE) append(g, 1, moved);
    take_surplus(g, 1);
    return was < 0 ? 0 : was ? 4 : 2;
}
