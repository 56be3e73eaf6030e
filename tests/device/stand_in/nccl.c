/* NCCL between the processes of one machine.
 *
 * What a rank has enqueued in one group is a bundle, as it is one kernel of NCCL: a bundle starts when those of the same
 * communicator before it have ended, and ends when all its parts have. A collective ends when all ranks have joined it, a
 * send when its receiver has the data: nothing is buffered, so that an order that needs NCCL's buffers hangs here.
 *
 * Ranks meet in a file that they share and read each other's memory. Collectives of a communicator are numbered as each
 * rank calls them; so are the messages of each pair. What has one number must have one type, size and operation.
 */
#define _GNU_SOURCE
#include "device.h"
#include "reduce.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RING 256
#define MOST_RANKS 64

enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, RECEIVE };
static const char *NAMES[] = {"all-reduce", "reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "send", "receive"};

struct call {
    int kind, type, operation, root; /* root: of a message, the other rank in the communicator */
    uint64_t numbers;
    const void *from;
    void *to;
};

/* in the shared file */
struct member {
    pid_t process;
    int rank; /* of the world */
    int color, key;
    uint64_t splits, splits_read; /* calls of ncclCommSplit, and those of which all colours are known here */
    uint64_t joined, read; /* collectives, and those of which this rank has read its data */
    struct call calls[RING];
};
struct pair {
    uint64_t sent, received;
    struct call messages[RING];
};
struct communicator {
    int size, me;
    char name[200];
    struct member *members;
    struct pair *pairs; /* [from * size + to] */
    uint64_t bundles, bundles_ended, received[MOST_RANKS];
};

struct part {
    struct call call;
    uint64_t number;
    bool has_ended;
    void *result;
};
struct bundle {
    struct shared_work work;
    struct communicator *in;
    uint64_t turn;
    int many;
    struct part *parts;
};

#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_SEQ_CST)
#define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_SEQ_CST)

/* communicators */
static void ranks_of(const struct communicator *in, char *text, size_t size)
{
    size_t length = 0;
    *text = 0;
    for (int i = 0; i < in->size && length < size; i++)
        length += snprintf(text + length, size - length, i ? ",%d" : "%d", in->members[i].rank);
}

static void wait_for_members(struct communicator *in, bool (*is_there)(struct member *, uint64_t), uint64_t number, const char *what)
{
    time_t begun = time(NULL);
    for (int i = 0; i < in->size;) {
        uint32_t seen = LOAD(*doorbell());
        if (is_there(&in->members[i], number)) {
            i++;
            continue;
        }
        if (time(NULL) - begun > setting(PATIENCE))
            give_up("member %d of communicator %s has not come: %s", i, in->name, what);
        wait_for_ring(seen, 0.2);
    }
}

static bool has_joined(struct member *member, uint64_t unused)
{
    return LOAD(member->process) != 0;
}

static bool has_split(struct member *member, uint64_t number)
{
    return LOAD(member->splits) > number;
}

static bool has_read_split(struct member *member, uint64_t number)
{
    return LOAD(member->splits_read) > number;
}

static struct communicator *join(const char *name, int size, int me)
{
    struct communicator *made = calloc(1, sizeof *made);
    size_t whole = size * sizeof(struct member) + size * size * sizeof(struct pair);
    const char *rank = getenv("RANK");
    if (size > MOST_RANKS)
        give_up("a communicator has %d ranks, and at most %d here", size, MOST_RANKS);
    count(COMMUNICATORS);
    made->size = size;
    made->me = me;
    snprintf(made->name, sizeof made->name, "%s", name);
    made->members = size > 1 ? shared_file(name, whole) : calloc(1, whole);
    made->pairs = (struct pair *)(made->members + size);
    made->members[me].rank = rank ? atoi(rank) : me;
    STORE(made->members[me].process, getpid());
    ring();
    wait_for_members(made, has_joined, 0, "ncclCommInitRank");
    return made;
}

EXPORTED ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    static int made;
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d-%lx-%d", (int)getpid(), time.tv_nsec + time.tv_sec * 1000000000l, made++);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    *made = (ncclComm_t)join(id.internal, ranks, rank);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t *made, int ranks, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(made, ranks, id, rank, NULL);
}

EXPORTED ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config)
{
    struct communicator *in = (struct communicator *)comm;
    struct member *mine = &in->members[in->me];
    uint64_t number = mine->splits;
    int size = 0, me = 0;
    char name[256];
    count(SPLITS);
    if (number)
        wait_for_members(in, has_read_split, number - 1, "ncclCommSplit");
    mine->color = color;
    mine->key = key;
    STORE(mine->splits, number + 1);
    ring();
    wait_for_members(in, has_split, number, "ncclCommSplit");
    for (int i = 0; i < in->size; i++)
        if (in->members[i].color == color) {
            size++;
            me += in->members[i].key < key || (in->members[i].key == key && i < in->me);
        }
    STORE(mine->splits_read, number + 1);
    ring();
    snprintf(name, sizeof name, "%s.%d.%d", in->name, (int)number, color);
    *made = color == NCCL_SPLIT_NOCOLOR ? NULL : (ncclComm_t)join(name, size, me);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return ncclSuccess; /* others may still read what this rank has left in the file */
}

EXPORTED ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommCount(ncclComm_t comm, int *size)
{
    *size = ((struct communicator *)comm)->size;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = ((struct communicator *)comm)->me;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommRegister(ncclComm_t comm, void *buffer, size_t size, void **handle)
{
    *handle = buffer;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle)
{
    return ncclSuccess;
}

EXPORTED const char *ncclGetErrorString(ncclResult_t error)
{
    return error == ncclSuccess ? "no error" : "an error of the stand-in";
}

EXPORTED const char *ncclGetLastError(ncclComm_t comm)
{
    return "";
}

/* bundles */
static bool fetch(struct communicator *in, int member, void *to, const void *from, size_t size)
{
    struct iovec here = {to, size}, there = {(void *)from, size};
    if (member == in->me || !size) {
        memcpy(to, from, size);
        return true;
    }
    ssize_t done = process_vm_readv(in->members[member].process, &here, 1, &there, 1, 0);
    if (done == (ssize_t)size)
        return true;
    if (done >= 0 || errno != ESRCH)
        give_up("memory of rank %d cannot be read: %s", in->members[member].rank, strerror(errno));
    return false; /* it has died; whoever supervises the job sees that */
}

static void describe_call(const struct call *call, char *text, size_t size)
{
    snprintf(text, size, "%s of %llu %s", NAMES[call->kind], (unsigned long long)call->numbers, name_of_type(call->type));
}

static void check_match(struct communicator *in, const struct part *part, int member, const struct call *other)
{
    const struct call *call = &part->call;
    bool is_message = call->kind >= SEND;
    bool match = call->numbers == other->numbers && call->type == other->type;
    if (!is_message)
        match = match && call->kind == other->kind && call->operation == other->operation && call->root == other->root;
    if (match)
        return;
    char mine[100], its[100], ranks[300];
    describe_call(call, mine, sizeof mine);
    describe_call(other, its, sizeof its);
    ranks_of(in, ranks, sizeof ranks);
    give_up("%s %llu of ranks %s: this rank calls %s (operation %d, root %d), rank %d calls %s (operation %d, root %d)",
            is_message ? "message" : "collective", (unsigned long long)part->number, ranks, mine, call->operation, call->root,
            in->members[member].rank, its, other->operation, other->root);
}

static bool advance_message(struct communicator *in, struct part *part)
{
    const struct call *call = &part->call;
    struct pair *pair = &in->pairs[call->kind == SEND ? in->me * in->size + call->root : call->root * in->size + in->me];
    if (call->kind == SEND)
        return part->has_ended = LOAD(pair->received) > part->number;
    if (LOAD(pair->sent) <= part->number || LOAD(pair->received) != part->number)
        return false;
    struct call *sent = &pair->messages[part->number % RING];
    check_match(in, part, call->root, sent);
    if (!fetch(in, call->root, call->to, sent->from, call->numbers * size_of_type(call->type)))
        return false;
    STORE(pair->received, part->number + 1);
    return part->has_ended = true;
}

/* What each rank reads of each other: where it begins there, and how much. */
static size_t share(const struct communicator *in, const struct call *call, int member, size_t *begin)
{
    size_t size = call->numbers * size_of_type(call->type);
    *begin = call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL ? in->me * size : 0;
    if ((call->kind == BROADCAST && member != call->root) || (call->kind == REDUCE && in->me != call->root))
        return 0;
    return size;
}

static bool read_others(struct communicator *in, struct part *part)
{
    const struct call *call = &part->call;
    size_t whole = call->numbers * size_of_type(call->type), begin, used = 0;
    for (int i = 0; i < in->size; i++) {
        if (LOAD(in->members[i].joined) <= part->number)
            return false;
        check_match(in, part, i, &in->members[i].calls[part->number % RING]);
    }
    char *parts = malloc(in->size * whole + 1);
    for (int i = 0; i < in->size; i++) {
        const char *from = in->members[i].calls[part->number % RING].from;
        size_t size = share(in, call, i, &begin);
        if (size && !fetch(in, i, parts + used, from + begin, size)) {
            free(parts);
            return false;
        }
        used += size;
    }
    part->result = parts;
    if (used && (call->kind == ALL_REDUCE || call->kind == REDUCE || call->kind == REDUCE_SCATTER)) {
        part->result = malloc(whole + 1);
        reduce(part->result, parts, in->size, call->numbers, call->type, call->operation);
        free(parts);
    }
    return true;
}

static bool advance_collective(struct communicator *in, struct part *part)
{
    const struct call *call = &part->call;
    struct member *mine = &in->members[in->me];
    size_t whole = call->numbers * size_of_type(call->type);
    if (!part->result) {
        if (LOAD(mine->read) != part->number || !read_others(in, part))
            return false;
        STORE(mine->read, part->number + 1);
        ring();
    }
    for (int i = 0; i < in->size; i++) /* some results overwrite what others have to read */
        if (LOAD(in->members[i].read) <= part->number)
            return false;
    if (call->kind == ALL_GATHER || call->kind == ALL_TO_ALL)
        whole *= in->size;
    if (call->kind != REDUCE || in->me == call->root)
        memcpy(call->to, part->result, whole);
    free(part->result);
    return part->has_ended = true;
}

static bool may_start(struct shared_work *work)
{
    struct bundle *bundle = (struct bundle *)work;
    return bundle->in->bundles_ended == bundle->turn;
}

static void start(struct shared_work *work)
{
    struct bundle *bundle = (struct bundle *)work;
    struct communicator *in = bundle->in;
    struct member *mine = &in->members[in->me];
    for (int i = 0; i < bundle->many; i++) {
        struct part *part = &bundle->parts[i];
        struct pair *to = &in->pairs[in->me * in->size + part->call.root];
        switch (part->call.kind) {
        case SEND:
            part->number = to->sent;
            to->messages[part->number % RING] = part->call;
            STORE(to->sent, part->number + 1);
            break;
        case RECEIVE: part->number = in->received[part->call.root]++; break;
        default:
            part->number = mine->joined;
            mine->calls[part->number % RING] = part->call;
            STORE(mine->joined, part->number + 1);
        }
    }
    ring();
}

static bool advance(struct shared_work *work)
{
    struct bundle *bundle = (struct bundle *)work;
    bool have_ended = true, has_moved = false;
    for (int i = 0; i < bundle->many; i++) {
        struct part *part = &bundle->parts[i];
        if (!part->has_ended)
            has_moved |= part->call.kind >= SEND ? advance_message(bundle->in, part) : advance_collective(bundle->in, part);
        have_ended &= part->has_ended;
    }
    if (has_moved)
        ring();
    if (!have_ended)
        return false;
    bundle->in->bundles_ended++;
    free(bundle->parts);
    free(bundle);
    return true;
}

static void describe(struct shared_work *work, char *text, size_t size)
{
    struct bundle *bundle = (struct bundle *)work;
    struct communicator *in = bundle->in;
    size_t length = 0;
    char ranks[300], call[100];
    ranks_of(in, ranks, sizeof ranks);
    for (int i = 0; i < bundle->many && length < size; i++) {
        struct part *part = &bundle->parts[i];
        if (part->has_ended)
            continue;
        describe_call(&part->call, call, sizeof call);
        length += snprintf(text + length, size - length, "%swaits in %s, number %llu", length ? "; " : "", call,
                           (unsigned long long)part->number);
        if (length >= size)
            return;
        if (part->call.kind >= SEND)
            length += snprintf(text + length, size - length, ", for rank %d", in->members[part->call.root].rank);
        else
            for (int other = 0; other < in->size && length < size; other++)
                if (LOAD(in->members[other].joined) <= part->number)
                    length += snprintf(text + length, size - length, ", for rank %d", in->members[other].rank);
    }
    if (length < size)
        snprintf(text + length, size - length, " (communicator of ranks %s)", ranks);
}

static __thread int depth, gathered, room;
static __thread struct { struct part part; struct communicator *in; struct stream *stream; } *group;

/* What an operation reads and writes; of a root, what it has. */
static void note_accesses(const struct communicator *in, const struct call *call, struct stream *stream)
{
    size_t size = call->numbers * size_of_type(call->type), of_all = in->size * size;
    bool reads_all = call->kind == REDUCE_SCATTER || call->kind == ALL_TO_ALL;
    bool writes_all = call->kind == ALL_GATHER || call->kind == ALL_TO_ALL, is_root = call->root == in->me;
    if (call->from && (call->kind != BROADCAST || is_root))
        note_shared_access(stream, call->from, reads_all ? of_all : size, false, NAMES[call->kind]);
    if (call->to && (call->kind != REDUCE || is_root))
        note_shared_access(stream, call->to, writes_all ? of_all : size, true, NAMES[call->kind]);
}

static void enqueue_group(void)
{
    for (int i = 0; i < gathered; i++) {
        struct communicator *in = group[i].in;
        if (!in)
            continue;
        struct bundle *bundle = calloc(1, sizeof *bundle);
        bundle->work = (struct shared_work){may_start, start, advance, describe};
        bundle->in = in;
        bundle->parts = calloc(gathered - i, sizeof *bundle->parts);
        for (int other = i; other < gathered; other++)
            if (group[other].in == in) {
                bundle->parts[bundle->many++] = group[other].part;
                note_accesses(in, &group[other].part.call, group[i].stream);
                group[other].in = NULL;
            }
        if (bundle->many >= RING)
            give_up("a group holds %d operations, and at most %d here", bundle->many, RING - 1);
        pthread_mutex_lock(&lock);
        bundle->turn = in->bundles++;
        pthread_mutex_unlock(&lock);
        enqueue_shared(group[i].stream, &bundle->work);
    }
    gathered = 0;
}

static ncclResult_t add(struct call call, ncclComm_t comm, cudaStream_t stream)
{
    count(call.kind == SEND ? SENDS : call.kind == RECEIVE ? RECEPTIONS : COLLECTIVES);
    if (gathered == room) {
        room = room ? 2 * room : 16;
        group = realloc(group, room * sizeof *group);
    }
    memset(&group[gathered], 0, sizeof *group);
    group[gathered].part.call = call;
    group[gathered].in = (struct communicator *)comm;
    group[gathered++].stream = stream_of(stream);
    if (!depth)
        enqueue_group();
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclGroupStart(void)
{
    depth++;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclGroupEnd(void)
{
    if (!--depth)
        enqueue_group();
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclAllReduce(const void *from, void *to, size_t numbers, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){ALL_REDUCE, type, operation, 0, numbers, from, to}, comm, stream);
}

EXPORTED ncclResult_t ncclReduce(const void *from, void *to, size_t numbers, ncclDataType_t type, ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){REDUCE, type, operation, root, numbers, from, to}, comm, stream);
}

EXPORTED ncclResult_t ncclReduceScatter(const void *from, void *to, size_t numbers, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){REDUCE_SCATTER, type, operation, 0, numbers, from, to}, comm, stream);
}

EXPORTED ncclResult_t ncclAllGather(const void *from, void *to, size_t numbers, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){ALL_GATHER, type, 0, 0, numbers, from, to}, comm, stream);
}

EXPORTED ncclResult_t ncclBroadcast(const void *from, void *to, size_t numbers, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){BROADCAST, type, 0, root, numbers, from, to}, comm, stream);
}

EXPORTED ncclResult_t ncclBcast(void *buffer, size_t numbers, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream)
{
    return ncclBroadcast(buffer, buffer, numbers, type, root, comm, stream);
}

EXPORTED ncclResult_t ncclAlltoAll(const void *from, void *to, size_t numbers, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){ALL_TO_ALL, type, 0, 0, numbers, from, to}, comm, stream);
}

EXPORTED ncclResult_t ncclSend(const void *from, size_t numbers, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){SEND, type, 0, peer, numbers, from, NULL}, comm, stream);
}

EXPORTED ncclResult_t ncclRecv(void *to, size_t numbers, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add((struct call){RECEIVE, type, 0, peer, numbers, NULL, to}, comm, stream);
}
