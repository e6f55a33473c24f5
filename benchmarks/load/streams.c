/* Opens many streaming requests to one server and reads every byte of the answers: the clients of streams.py.
 *
 *     streams --port P --path /v1/chat/completions --body FILE --streams N --tokens T --words FILE
 *
 * The engine behind the server answers with words that tell the time (llmcore.testing.clock_engine): the word in line
 * i of the file --words stands for the CLOCK_MONOTONIC time i * TICK_US, which starts again after the last line. So
 * every token's way from the engine to this process can be timed, whatever the dialect, and a token that is lost or
 * changed is noticed. One thread, one epoll; answers are HTTP/1.1, chunked or closed by the server, and SSE.
 *
 * Prints "steady" when every stream has its first token, "ending" when the first has ended, then one JSON object.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "words.h"

enum { TICK_US = 250, LINE_MAX_BYTES = 8192, READ_BYTES = 65536, CODES = 600 };
enum phase { CONNECTING, HEAD, BODY, ENDED };

struct stream {
    int fd, phase, status, chunked, tokens, finished, failed;
    long remaining;                /* of the chunk; -1: in a chunk's head; -2: behind its data; -3: body is over */
    int64_t sent_us, stamp_us;     /* stamp_us: of the newest token, 0 before the first */
    size_t out, used;
    char line[LINE_MAX_BYTES];     /* a line of the header or of the event stream that is not whole yet */
    size_t size_used;
    char size[32];                 /* of the next chunk, in hexadecimal digits */
};

struct samples { float *at; size_t n, room; };

static struct { int port, streams, tokens, nap_us; double timeout; const char *path, *body, *words; } option = {
    .streams = 1, .tokens = 1, .timeout = 60.0, .path = "/v1/chat/completions" };
static struct stream *all;
static struct samples latency, steady, first, refused;
static char *request;
static size_t request_bytes;
static uint64_t bytes, events, tokens, errors, unknown;
static int begun, ended, is_steady, statuses[CODES];

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "see the head of streams.c");
    exit(2);
}

/* --- figures */

static void note(struct samples *samples, double ms)
{
    if (samples->n == samples->room) {
        samples->room = samples->room ? samples->room * 2 : 4096;
        samples->at = realloc(samples->at, samples->room * sizeof *samples->at);
        if (!samples->at)
            die("memory");
    }
    samples->at[samples->n++] = (float)ms;
}

static int compare(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *samples)
{
    static const struct { const char *name; double share; } shown[] = {
        {"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p999", 0.999}, {"max", 1.0}};
    if (samples->n)
        qsort(samples->at, samples->n, sizeof *samples->at, compare);
    printf(",\"%s\":{\"n\":%zu", name, samples->n);
    for (size_t i = 0; samples->n && i < sizeof shown / sizeof *shown; i++)
        printf(",\"%s\":%.3f", shown[i].name, samples->at[(size_t)(shown[i].share * (double)(samples->n - 1))]);
    printf("}");
}

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
}

/* --- what comes in */

static void end(struct stream *s)
{
    if (s->phase == ENDED)
        return;
    close(s->fd);
    s->phase = ENDED;
    if (is_steady && ended == 0)
        say("ending");
    is_steady = 0;
    ended++;
    if (s->status == 429 || s->status == 503)
        note(&refused, (double)(now_us() - s->sent_us) / 1e3);
    else if (s->failed || !s->finished || s->tokens != option.tokens)
        errors++;
    statuses[s->status < CODES ? s->status : 0]++;
}

static void take_word(struct stream *s, const char *word, size_t length, int64_t now)
{
    size_t at = length < WORD_BYTES ? place_of(word, length) : 0;
    if (length >= WORD_BYTES || !table[at].word[0]) {
        unknown++;
        return;
    }
    int64_t wrap = ticks * TICK_US, told = (int64_t)table[at].tick * TICK_US;
    /* The first stamp is taken to be younger than one turn of the clock, others follow each other closer than that. */
    s->stamp_us = s->stamp_us ? s->stamp_us + ((told - s->stamp_us) % wrap + wrap) % wrap
                              : now - ((now - told) % wrap + wrap) % wrap;
    tokens++;
    double ms = (double)(now - s->stamp_us) / 1e3;
    note(&latency, ms);
    if (is_steady)
        note(&steady, ms);
    if (s->tokens++ == 0) {
        note(&first, (double)(now - s->sent_us) / 1e3);
        if (++begun == option.streams && ended == 0) {
            is_steady = 1;
            say("steady");
        }
    }
}

static void take_event(struct stream *s, char *line, int64_t now)
{
    static const char *const members[] = {"\"content\":\"", "\"text\":\""};
    if (strncmp(line, "data:", 5))
        return;
    if (!strcmp(line, "data: [DONE]")) {
        s->finished = 1;
        return;
    }
    events++;
    if (strstr(line, "\"error\":{"))
        s->failed = 1;
    if (strstr(line, "\"finished\":true"))
        s->finished = 1;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        char *at = strstr(line, members[i]);
        if (!at)
            continue;
        for (at += strlen(members[i]); *at && *at != '"';) {
            size_t length = strcspn(at + (*at == ' '), " \"");
            take_word(s, at + (*at == ' '), length, now);
            at += length + (*at == ' ');
        }
        return;
    }
}

/* The body without its framing, line by line. */
static void take_text(struct stream *s, const char *data, size_t n, int64_t now)
{
    for (size_t i = 0; i < n; i++) {
        if (data[i] != '\n') {
            if (s->used < LINE_MAX_BYTES - 1)
                s->line[s->used++] = data[i];
            continue;
        }
        s->line[s->used] = 0;
        take_event(s, s->line, now);
        s->used = 0;
    }
}

static void take_body(struct stream *s, const char *data, size_t n, int64_t now)
{
    if (!s->chunked) {
        take_text(s, data, n, now);
        return;
    }
    for (size_t i = 0; i < n && s->remaining != -3;) {
        if (s->remaining > 0) {
            size_t part = n - i < (size_t)s->remaining ? n - i : (size_t)s->remaining;
            take_text(s, data + i, part, now);
            i += part;
            s->remaining -= (long)part;
            if (!s->remaining)
                s->remaining = -2;
        } else if (data[i++] == '\n') {
            if (s->remaining == -2) {
                s->remaining = -1;
            } else {
                s->size[s->size_used] = 0;
                s->remaining = strtol(s->size, NULL, 16);
                s->size_used = 0;
                if (!s->remaining)
                    s->remaining = -3;
            }
        } else if (s->remaining == -1 && s->size_used < sizeof s->size - 1) {
            s->size[s->size_used++] = data[i - 1];
        }
    }
}

/* Returns how much of `data` was the header's. */
static size_t take_head(struct stream *s, const char *data, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (data[i] != '\n') {
            if (s->used < LINE_MAX_BYTES - 1)
                s->line[s->used++] = (char)tolower((unsigned char)data[i]);
            continue;
        }
        s->line[s->used] = 0;
        if (!strncmp(s->line, "http/1.1 ", 9))
            s->status = atoi(s->line + 9);
        if (!strncmp(s->line, "transfer-encoding: chunked", 26))
            s->chunked = 1;
        int empty = s->used <= 1;
        s->used = 0;
        if (empty) {
            s->phase = BODY;
            s->remaining = -1;
            return i + 1;
        }
    }
    return n;
}

static void receive(struct stream *s)
{
    static char data[READ_BYTES];
    ssize_t n = read(s->fd, data, sizeof data);
    int64_t now = now_us();
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        s->failed |= n < 0;
        end(s);
        return;
    }
    bytes += (uint64_t)n;
    size_t head = s->phase == HEAD ? take_head(s, data, (size_t)n) : 0;
    if (s->phase == BODY && s->status != 200)
        end(s);
    else if (s->phase == BODY)
        take_body(s, data + head, (size_t)n - head, now);
    if (s->phase == BODY && s->remaining == -3)
        end(s);
}

/* --- what goes out */

static void open_stream(struct stream *s, int poller)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)option.port)};
    struct epoll_event event = {.events = EPOLLOUT, .data.ptr = s};
    int one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    s->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (s->fd < 0)
        die("socket");
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    s->phase = CONNECTING;
    s->sent_us = now_us();
    if (connect(s->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS)
        die("connect");
    epoll_ctl(poller, EPOLL_CTL_ADD, s->fd, &event);
}

static void send_request(struct stream *s, int poller)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
    ssize_t n = send(s->fd, request + s->out, request_bytes - s->out, MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n < 0) {
        s->failed = 1;
        end(s);
        return;
    }
    s->out += (size_t)n;
    if (s->out == request_bytes) {
        s->phase = HEAD;
        epoll_ctl(poller, EPOLL_CTL_MOD, s->fd, &event);
    }
}

static void read_request(void)
{
    char body[1 << 20];
    FILE *file = fopen(option.body, "r");
    if (!file)
        die(option.body);
    size_t n = fread(body, 1, sizeof body, file);
    fclose(file);
    request_bytes = (size_t)asprintf(&request,
        "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%.*s",
        option.path, option.port, n, (int)n, body);
}

static void read_options(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--port")) option.port = atoi(value);
        else if (!strcmp(name, "--streams")) option.streams = atoi(value);
        else if (!strcmp(name, "--tokens")) option.tokens = atoi(value);
        else if (!strcmp(name, "--timeout")) option.timeout = atof(value);
        else if (!strcmp(name, "--nap_us")) option.nap_us = atoi(value);
        else if (!strcmp(name, "--path")) option.path = value;
        else if (!strcmp(name, "--body")) option.body = value;
        else if (!strcmp(name, "--words")) option.words = value;
        else die(name);
    }
    if (!option.port || !option.body || !option.words || option.streams < 1)
        die("--port, --body, --words and --streams are needed");
}

static void run(int64_t start)
{
    static struct epoll_event ready[512];
    int poller = epoll_create1(0);
    for (int i = 0; i < option.streams; i++)
        open_stream(&all[i], poller);
    while (ended < option.streams && (double)(now_us() - start) / 1e6 < option.timeout) {
        if (option.nap_us)
            usleep((useconds_t)option.nap_us);
        int n = epoll_wait(poller, ready, 512, 100);
        for (int i = 0; i < n; i++) {
            struct stream *s = ready[i].data.ptr;
            if (s->phase == CONNECTING)
                send_request(s, poller);
            else if (s->phase != ENDED)
                receive(s);
        }
    }
}

int main(int argc, char **argv)
{
    struct rlimit files;
    struct rusage used;
    read_options(argc, argv);
    if (!read_words(option.words))
        die(option.words);
    read_request();
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    all = calloc((size_t)option.streams, sizeof *all);
    if (!all)
        die("memory");
    int64_t start = now_us();
    run(start);
    int hung = option.streams - ended;
    getrusage(RUSAGE_SELF, &used);
    printf("{\"streams\":%d,\"expected\":%lld,\"tokens\":%llu,\"events\":%llu,\"bytes\":%llu,\"errors\":%llu,"
           "\"unknown\":%llu,\"hung\":%d,\"seconds\":%.3f,\"cpu_seconds\":%.3f,\"status\":{",
           option.streams, (long long)option.streams * option.tokens, (unsigned long long)tokens,
           (unsigned long long)events, (unsigned long long)bytes, (unsigned long long)errors,
           (unsigned long long)unknown, hung, (double)(now_us() - start) / 1e6,
           (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec)
               + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    const char *comma = "";
    for (int code = 0; code < CODES; code++)
        if (statuses[code]) {
            printf("%s\"%d\":%d", comma, code, statuses[code]);
            comma = ",";
        }
    printf("}");
    print_samples("latency_ms", &latency);
    print_samples("steady_ms", &steady);
    print_samples("first_token_ms", &first);
    print_samples("refused_ms", &refused);
    puts("}");
    return hung || errors || unknown ? 1 : 0;
}
