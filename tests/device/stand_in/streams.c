/* Streams, events and what waits for what.
 *
 * An operation of a stream ends behind those before it. What waits for nothing ends as it is enqueued; a thread, "the
 * device", runs what had to wait. Kernels do nothing and end at once, so only order counts.
 *
 * With CUDA_DEVICE_MAX_CONNECTIONS=N streams share N queues to the device, and what is in one of them starts in the order
 * in which the host has enqueued it. Without the variable each stream has its own.
 */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum kind { KERNELS, COPY, FILL, CALL, WAIT, SHARED };

struct operation {
    enum kind kind;
    bool has_started;
    uint64_t order; /* over all streams: of the last kernel, where kernels are one operation */
    uint64_t steps; /* kernels in it; else 1 */
    struct operation *next;
    struct event event;
    void *to, *from;
    bool is_staged; /* `from` is a copy of pageable memory */
    int value;
    size_t size;
    void (*function)(void *);
    struct shared_work *work;
};

struct stream {
    int number, device;
    uint64_t enqueued, ended; /* operations so far */
    struct operation *first, *last;
    struct stream *next;
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER, pending = PTHREAD_COND_INITIALIZER;
static struct stream *streams, *of_device[MOST_DEVICES];
static uint64_t last_order;
static int streams_made;
static bool is_running;
static double last_move;
static __thread int chosen_device;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

int current_device(void)
{
    return chosen_device;
}

void choose_device(int device)
{
    chosen_device = device;
}

struct stream *make_stream(void)
{
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    stream->number = streams_made++;
    if (stream->number >= MOST_STREAMS)
        give_up("a process has more than %d streams", MOST_STREAMS);
    stream->device = chosen_device;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

static int connection_of(const struct stream *stream)
{
    int connections = (int)setting(CONNECTIONS);
    return connections ? stream->number % connections : stream->number;
}

/* The stream of a handle; that of NULL and of the constants for it is the device's own. */
struct stream *stream_of(void *handle)
{
    if ((uintptr_t)handle > 2)
        return handle;
    if (!of_device[chosen_device]) {
        struct stream *made = make_stream();
        pthread_mutex_lock(&lock);
        if (!of_device[chosen_device])
            of_device[chosen_device] = made;
        pthread_mutex_unlock(&lock);
    }
    return of_device[chosen_device];
}

bool has_happened(const struct event *event)
{
    return !event->stream || event->stream->ended >= event->place;
}

static bool may_start(const struct stream *stream, const struct operation *operation)
{
    for (struct stream *other = streams; other; other = other->next)
        if (other->first && other != stream && connection_of(other) == connection_of(stream))
            for (struct operation *earlier = other->first; earlier; earlier = earlier->next)
                if (!earlier->has_started && earlier->order < operation->order)
                    return false;
    if (operation->kind == WAIT)
        return has_happened(&operation->event);
    return operation->kind != SHARED || operation->work->may_start(operation->work);
}

/* Does what the first operation of a stream is about; true once it has ended. */
static bool run(struct operation *operation)
{
    switch (operation->kind) {
    case COPY:
        memmove(operation->to, operation->from, operation->size);
        if (operation->is_staged)
            free(operation->from);
        return true;
    case FILL:
        memset(operation->to, operation->value, operation->size);
        return true;
    case SHARED:
        if (!operation->has_started)
            operation->work->start(operation->work);
        return operation->work->advance(operation->work);
    default:
        return true;
    }
}

/* Ends what can end; true if anything has started or ended. */
static bool advance(void)
{
    bool any = false, again = true;
    while (again) {
        again = false;
        for (struct stream *stream = streams; stream; stream = stream->next)
            while (stream->first) {
                struct operation *operation = stream->first;
                if (!operation->has_started && !may_start(stream, operation))
                    break;
                bool ends = run(operation), has_begun = !operation->has_started;
                operation->has_started = true;
                again |= ends || has_begun;
                if (!ends)
                    break;
                stream->first = operation->next;
                if (!stream->first)
                    stream->last = NULL;
                stream->ended += operation->steps;
                if (operation->kind == CALL) { /* it may call CUDA's functions that take no lock of ours */
                    pthread_mutex_unlock(&lock);
                    operation->function(operation->to);
                    pthread_mutex_lock(&lock);
                }
                free(operation);
            }
        any |= again;
    }
    return any;
}

static void describe(const struct stream *stream, char *text, size_t size)
{
    const struct operation *first = stream->first;
    char what[1024] = "";
    if (first->kind == SHARED && (first->has_started || first->work->may_start(first->work)))
        first->work->describe(first->work, what, sizeof what);
    else if (first->kind == WAIT && !has_happened(&first->event))
        snprintf(what, sizeof what, "waits for stream %d", first->event.stream->number);
    if (!*what)
        snprintf(what, sizeof what, "waits for its turn in connection %d", connection_of(stream));
    snprintf(text, size, "stream %d %s, %llu operations behind it", stream->number, what,
             (unsigned long long)(stream->enqueued - stream->ended - first->steps));
}

static void give_up_waiting(double patience)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->first) {
            char text[2048];
            describe(stream, text, sizeof text);
            say("%s", text);
        }
    give_up("nothing has moved for %.0f s: this step hangs", patience);
}

static void *device(void *unused)
{
    pthread_mutex_lock(&lock);
    last_move = now();
    for (;;) {
        uint32_t seen = __atomic_load_n(doorbell(), __ATOMIC_SEQ_CST);
        bool is_pending = false;
        if (advance()) {
            last_move = now();
            pthread_cond_broadcast(&moved);
            ring();
        }
        for (struct stream *stream = streams; stream; stream = stream->next)
            is_pending |= stream->first != NULL;
        if (!is_pending) {
            pthread_cond_wait(&pending, &lock);
            last_move = now();
            continue;
        }
        if (now() - last_move > setting(PATIENCE))
            give_up_waiting(now() - last_move);
        pthread_mutex_unlock(&lock);
        wait_for_ring(seen, 0.2);
        pthread_mutex_lock(&lock);
    }
    return unused;
}

static void enqueue(struct stream *stream, struct operation operation)
{
    pthread_mutex_lock(&lock);
    operation.order = ++last_order;
    operation.steps = 1;
    stream->enqueued++;
    if (operation.kind == COPY)
        note_copy(stream->number, stream->enqueued, operation.to, operation.from, operation.size);
    if (operation.kind == FILL)
        note_access(stream->number, stream->enqueued, operation.to, operation.size, true, "a copy or fill");
    struct operation *last = stream->last;
    if (operation.kind == KERNELS && last && last->kind == KERNELS && last->order == last_order - 1) {
        last->order = last_order;
        last->steps++;
        pthread_mutex_unlock(&lock);
        return;
    }
    if (!last && operation.kind != SHARED && operation.kind != CALL && may_start(stream, &operation)) {
        run(&operation);
        stream->ended++;
        pthread_mutex_unlock(&lock);
        return;
    }
    struct operation *kept = malloc(sizeof *kept);
    *kept = operation;
    if (kept->kind == COPY && place_of(kept->from, NULL, NULL, NULL) == PAGEABLE) {
        kept->is_staged = true; /* CUDA, too, has read it when the call returns */
        kept->from = malloc(kept->size + !kept->size);
        memcpy(kept->from, operation.from, kept->size);
    }
    if (last)
        last->next = kept;
    else
        stream->first = kept;
    stream->last = kept;
    if (!is_running) {
        pthread_t thread;
        is_running = true;
        pthread_create(&thread, NULL, device, NULL);
        pthread_detach(thread);
    }
    pthread_cond_signal(&pending);
    pthread_mutex_unlock(&lock);
    if (operation.kind == SHARED || operation.kind == CALL)
        ring();
}

void enqueue_kernel(struct stream *stream)
{
    count(LAUNCHES);
    enqueue(stream, (struct operation){.kind = KERNELS});
}

void enqueue_copy(struct stream *stream, void *to, const void *from, size_t size)
{
    count(COPIES);
    enqueue(stream, (struct operation){.kind = COPY, .to = to, .from = (void *)from, .size = size});
    if (place_of(to, NULL, NULL, NULL) == PAGEABLE)
        host_waits_for_stream(stream);
}

void enqueue_fill(struct stream *stream, void *to, int value, size_t size)
{
    count(FILLS);
    enqueue(stream, (struct operation){.kind = FILL, .to = to, .value = value, .size = size});
}

void enqueue_call(struct stream *stream, void (*function)(void *), void *argument)
{
    enqueue(stream, (struct operation){.kind = CALL, .function = function, .to = argument});
}

void enqueue_shared(struct stream *stream, struct shared_work *work)
{
    enqueue(stream, (struct operation){.kind = SHARED, .work = work});
}

static void mark_end(struct event *event, struct stream *stream)
{
    event->stream = stream;
    event->place = stream->enqueued;
    event->seconds = now();
    clock_to_event(event->clock, stream->number, stream->enqueued);
}

void record_event(struct event *event, struct stream *stream)
{
    count(RECORDS);
    pthread_mutex_lock(&lock);
    mark_end(event, stream);
    pthread_mutex_unlock(&lock);
}

void await_event(struct stream *stream, const struct event *event)
{
    count(WAITS);
    if (!event->stream || event->stream == stream)
        return;
    pthread_mutex_lock(&lock);
    clock_from_event(stream->number, event->clock);
    pthread_mutex_unlock(&lock);
    enqueue(stream, (struct operation){.kind = WAIT, .event = *event});
}

void host_waits_for_event(const struct event *event)
{
    struct event awaited = *event;
    pthread_mutex_lock(&lock);
    while (!has_happened(&awaited))
        pthread_cond_wait(&moved, &lock);
    host_knows(awaited.clock);
    pthread_mutex_unlock(&lock);
}

bool host_sees(const struct event *event)
{
    pthread_mutex_lock(&lock);
    bool sees = has_happened(event);
    if (sees && event->stream)
        host_knows(event->clock);
    pthread_mutex_unlock(&lock);
    return sees;
}

void host_waits_for_stream(struct stream *stream)
{
    struct event end;
    pthread_mutex_lock(&lock);
    mark_end(&end, stream);
    pthread_mutex_unlock(&lock);
    host_waits_for_event(&end);
}

void host_waits_for_device(void)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->device == chosen_device)
            host_waits_for_stream(stream);
}

/* Is called before the operation is enqueued. */
void note_shared_access(struct stream *stream, const void *begin, size_t size, bool writes, const char *what)
{
    pthread_mutex_lock(&lock);
    note_access(stream->number, stream->enqueued + 1, begin, size, writes, what);
    pthread_mutex_unlock(&lock);
}

void stream_takes(struct stream *stream, void *begin, size_t size)
{
    pthread_mutex_lock(&lock);
    note_taking(stream->number, begin, size);
    pthread_mutex_unlock(&lock);
    zero_memory(begin, size);
}
