/* Memory that is used again while an operation of another stream may still read or write it.
 *
 * What a stream or the host knows of the others is a clock: how many operations of each stream have ended before whatever
 * it does next. An event carries the clock of its stream to who waits for it. So it does not matter how soon an operation
 * has ended this time: it may be relied on only where a clock says so. Known are copies, fills and NCCL's operations; what
 * kernels read and write is not.
 *
 * With STAND_IN_HAZARDS=2 a copy to the host may come too late, which spoils what it brings: the process ends when that
 * is copied from there. It cannot be seen whether the host reads it.
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>

static struct access {
    const char *begin, *end;
    int stream;
    uint64_t place; /* of the operation in its stream */
    bool writes;
    const char *what, *to; /* of a copy to the host, where */
} *accesses;
static size_t many, room;
static struct spoilt { const char *begin, *end; } *spoilt;
static size_t many_spoilt, room_for_spoilt;
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

static void spoil(const char *begin, const char *end)
{
    if (many_spoilt == room_for_spoilt) {
        room_for_spoilt = room_for_spoilt ? 2 * room_for_spoilt : 64;
        spoilt = realloc(spoilt, room_for_spoilt * sizeof *spoilt);
    }
    spoilt[many_spoilt++] = (struct spoilt){begin, end};
}

/* Of spoilt memory of the host: ends the process if it is read, forgets it if it is written. */
static void check_host(const char *begin, size_t size, bool writes)
{
    size_t kept = 0;
    for (size_t i = 0; i < many_spoilt; i++) {
        bool meets = spoilt[i].begin < begin + size && begin < spoilt[i].end;
        if (meets && !writes)
            give_up("%zu bytes are copied from the host, whose source may have been used again before they came", size);
        if (!meets)
            spoilt[kept++] = spoilt[i];
    }
    many_spoilt = kept;
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
            clock_of(stream)[other->stream] < other->place) {
            if (!other->to || setting(HAZARDS) < 2)
                give_up("%zu bytes: %s by stream %d may come while stream %d still is at %s of them, for which it does not wait",
                        (size_t)(end - begin), what, stream, other->stream, other->what);
            spoil(other->to, other->to + (other->end - other->begin));
            continue;
        }
        accesses[kept++] = *other;
    }
    many = kept;
}

static void note(int stream, uint64_t place, const void *begin, size_t size, bool writes, const char *what, const char *to)
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
    accesses[many++] = (struct access){from, from + size, stream, place, writes, what, to};
}

void note_access(int stream, uint64_t place, const void *begin, size_t size, bool writes, const char *what)
{
    note(stream, place, begin, size, writes, what, NULL);
}

void note_copy(int stream, uint64_t place, const void *to, const void *from, size_t size)
{
    bool to_host = place_of(to, NULL, NULL, NULL) != ON_DEVICE;
    if (place_of(from, NULL, NULL, NULL) != ON_DEVICE)
        check_host(from, size, false);
    note(stream, place, from, size, false, "a copy", to_host ? to : NULL);
    if (to_host)
        check_host(to, size, true);
    note(stream, place, to, size, true, "a copy or fill", NULL);
}

void note_taking(int stream, void *begin, size_t size)
{
    join(clock_of(stream), of_host);
    check(begin, (char *)begin + size, stream, true, "the allocator's use");
}
