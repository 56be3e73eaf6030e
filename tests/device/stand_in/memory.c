/* Memory of devices that is the host's, and pinned memory. Pages that nobody has written cost nothing. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096

static struct range {
    char *begin;
    size_t size;
    enum place place;
    int device;
    bool is_ours; /* else the host's, registered */
} *ranges;
static size_t many, room;
static size_t in_use[MOST_DEVICES];
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

size_t memory_of_device(void)
{
    return (size_t)(setting(GIBIBYTES) * (1ul << 30));
}

/* Gives pages back to the system, of which they come zeroed when they are next used. */
void zero_memory(void *begin, size_t size)
{
    char *from = begin, *to = from + size;
    char *first = (char *)(((uintptr_t)from + PAGE - 1) / PAGE * PAGE), *last = (char *)((uintptr_t)to / PAGE * PAGE);
    if (size < 16 * PAGE) {
        memset(from, 0, size);
        return;
    }
    memset(from, 0, first - from);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, to - last);
}

size_t memory_in_use(int device)
{
    return in_use[device];
}

/* The allocator is of the library that calls, so what follows it can be loaded now and not before. */
static void follow_allocator(void)
{
    Dl_info own;
    char path[4096];
    if (!dladdr((void *)follow_allocator, &own))
        return;
    snprintf(path, sizeof path, "%.*s/allocator.so", (int)(strrchr(own.dli_fname, '/') - own.dli_fname), own.dli_fname);
    if (!dlopen(path, RTLD_NOW | RTLD_GLOBAL))
        give_up("%s", dlerror());
}

static void add(struct range range)
{
    if (many == room) {
        room = room ? 2 * room : 1024;
        ranges = realloc(ranges, room * sizeof *ranges);
    }
    ranges[many++] = range;
}

static struct range *range_of(const void *pointer)
{
    const char *place = pointer;
    for (size_t i = 0; i < many; i++)
        if (place >= ranges[i].begin && place < ranges[i].begin + ranges[i].size)
            return &ranges[i];
    return NULL;
}

bool take_memory(void **pointer, size_t size, enum place place, int device)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (place == ON_DEVICE)
        pthread_once(&once, follow_allocator);
    size_t whole = (size + !size + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&guard);
    bool fits = place != ON_DEVICE || in_use[device] + whole <= memory_of_device();
    void *begin = MAP_FAILED;
    if (fits)
        begin = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin != MAP_FAILED) {
        add((struct range){begin, whole, place, device, true});
        if (place == ON_DEVICE)
            in_use[device] += whole;
        *pointer = begin;
    }
    pthread_mutex_unlock(&guard);
    return begin != MAP_FAILED;
}

bool drop_memory(void *pointer)
{
    pthread_mutex_lock(&guard);
    struct range *range = range_of(pointer);
    bool found = range && range->begin == (char *)pointer;
    if (found) {
        if (range->place == ON_DEVICE)
            in_use[range->device] -= range->size;
        if (range->is_ours)
            munmap(range->begin, range->size);
        *range = ranges[--many];
    }
    pthread_mutex_unlock(&guard);
    return found;
}

void register_memory(void *pointer, size_t size)
{
    pthread_mutex_lock(&guard);
    add((struct range){pointer, size, PINNED, 0, false});
    pthread_mutex_unlock(&guard);
}

enum place place_of(const void *pointer, int *device, void **base, size_t *size)
{
    pthread_mutex_lock(&guard);
    struct range *range = range_of(pointer);
    enum place place = range ? range->place : PAGEABLE;
    if (device)
        *device = range ? range->device : 0;
    if (base)
        *base = range ? range->begin : NULL;
    if (size)
        *size = range ? range->size : 0;
    pthread_mutex_unlock(&guard);
    return place;
}

EXPORTED void stand_in_takes(void *begin, size_t size, void *stream)
{
    stream_takes(stream_of(stream), begin, size);
}
