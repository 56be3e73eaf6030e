/* Memory that is used again while an operation of another stream may still read or write it.
 *
 * What a stream or the host knows of the others is a clock: how many operations of each stream have ended before whatever
 * it does next. An event carries the clock of its stream to who waits for it. So it does not matter how soon an operation
 * has ended this time: it may be relied on only where a clock says so. Known are copies, fills and NCCL's operations; what
 * kernels read and write is not.
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>

static struct access {
    const char *begin, *end;
    int stream;
    uint64_t place; /* of the operation in its stream */
    bool writes;
    const char *what;
} *accesses;
static size_t many, room;
static uint64_t of_host[MOST_STREAMS];
static uint64_t (*clocks)[MOST_STREAMS]; /* by stream */

uint64_t *clock_of(int stream)
{
    if (!clocks)
        clocks = calloc(MOST_STREAMS, sizeof *clocks);
    return clocks[stream];
}

static void join(uint64_t *into, const uint64_t *from)
{
    for (int i = 0; i < MOST_STREAMS; i++)
        if (from[i] > into[i])
            into[i] = from[i];
}

void clock_to_event(uint64_t *event, int stream, uint64_t place)
{
    join(clock_of(stream), of_host);
    memcpy(event, clock_of(stream), sizeof of_host);
    event[stream] = place;
}

void clock_from_event(int stream, const uint64_t *event)
{
    join(clock_of(stream), event);
}

void host_knows(const uint64_t *event)
{
    join(of_host, event);
}

/* Ends the process if an access by `stream` of what lies in the range may come too early; forgets what has surely ended. */
static void check(const char *begin, const char *end, int stream, bool writes, const char *what)
{
    size_t kept = 0;
    for (size_t i = 0; i < many; i++) {
        struct access *other = &accesses[i];
        if (of_host[other->stream] >= other->place)
            continue;
        if (other->begin < end && begin < other->end && other->stream != stream && (writes || other->writes) &&
            clock_of(stream)[other->stream] < other->place && setting(HAZARDS))
            give_up("%zu bytes: %s by stream %d may come while stream %d still is at %s of them, for which it does not wait",
                    (size_t)(end - begin), what, stream, other->stream, other->what);
        accesses[kept++] = *other;
    }
    many = kept;
}

void note_access(int stream, uint64_t place, const void *begin, size_t size, bool writes, const char *what)
{
    const char *from = begin;
    if (!size || place_of(begin, NULL, NULL, NULL) != ON_DEVICE)
        return;
    join(clock_of(stream), of_host);
    check(from, from + size, stream, writes, what);
    if (many == room) {
        room = room ? 2 * room : 1024;
        accesses = realloc(accesses, room * sizeof *accesses);
    }
    accesses[many++] = (struct access){from, from + size, stream, place, writes, what};
}

void note_taking(int stream, void *begin, size_t size)
{
    join(clock_of(stream), of_host);
    check(begin, (char *)begin + size, stream, true, "the allocator's use");
}
