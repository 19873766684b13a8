/*
 * The program in the guest. It uses libibverbs over the kernel's soft-RoCE, and receives commands
 * over a serial line. It acts as client and as responder. Each line is one verb, or fills or checks
 * memory. The reply is one line: "ok ...", "bad ..." (unexpected content), or "error ...".
 *
 * There is one device, one protection domain and one buffer. Work requests and regions use offsets
 * in the buffer. Numbers are decimal or begin with 0x.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#define BUFFER ((size_t)4 << 20)
#define SLOTS 16
#define QUEUE 64
#define ARGUMENTS 16
/* Time limit for a completion in seconds: the machine is emulated and shares its host. */
#define PATIENCE 180

static FILE *answers;
static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_mr *everything; /* gives the lkey of work requests */
static uint8_t *buffer;

static struct ibv_cq *cqs[SLOTS];
static struct ibv_qp *qps[SLOTS];
static struct ibv_mr *regions[SLOTS];
static struct ibv_mw *windows[SLOTS];

static char *word[ARGUMENTS]; /* the line, split at its spaces */

static void answer(const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vfprintf(answers, format, list);
	va_end(list);
	fputc('\n', answers);
	fflush(answers);
}

static void done(const char *what, int error)
{
	if (error)
		answer("error %s: %s", what, strerror(error));
	else
		answer("ok");
}

static uint64_t number(int at)
{
	return strtoull(word[at], NULL, 0);
}

static int slot(int at)
{
	uint64_t n = number(at);
	if (n < SLOTS)
		return n;
	answer("error there are %d slots", SLOTS);
	exit(2);
}

/* A range of the buffer: offset and length. */
static uint8_t *range(int at)
{
	uint64_t offset = number(at), length = number(at + 1);
	if (offset <= BUFFER && length <= BUFFER - offset)
		return buffer + offset;
	answer("error beyond the buffer");
	exit(2);
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Byte `at` of the pattern of a seed, as in the test (tests/src/guest.rs). */
static uint8_t pattern(uint64_t seed, uint64_t at)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15 + at / 8 + 1;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	x ^= x >> 31;
	return x >> at % 8 * 8;
}

/* fill OFFSET LENGTH SEED */
static void fill(void)
{
	uint8_t *at = range(1);
	for (uint64_t i = 0, length = number(2), seed = number(3); i < length; i++)
		at[i] = pattern(seed, i);
	answer("ok");
}

/* check OFFSET LENGTH SEED: compares the memory with the pattern. */
static void check(void)
{
	volatile uint8_t *at = range(1);
	for (uint64_t i = 0, length = number(2), seed = number(3); i < length; i++)
		if (at[i] != pattern(seed, i)) {
			answer("bad byte %" PRIu64 " of %" PRIu64 " is %02x and should be %02x", i,
			       length, at[i], pattern(seed, i));
			return;
		}
	answer("ok");
}

/* hash OFFSET LENGTH: FNV-1a of the memory. */
static void hash(void)
{
	volatile uint8_t *at = range(1);
	uint64_t h = 0xcbf29ce484222325;
	for (uint64_t i = 0, length = number(2); i < length; i++)
		h = (h ^ at[i]) * 0x100000001b3;
	answer("ok %" PRIu64, h);
}

/* put OFFSET VALUE, get OFFSET: a word of 8 bytes in this CPU's byte order, which rxe's atomics
 * use. */
static void put(void)
{
	*(volatile uint64_t *)(buffer + number(1) % BUFFER / 8 * 8) = number(2);
	answer("ok");
}

static void get(void)
{
	answer("ok %" PRIu64, *(volatile uint64_t *)(buffer + number(1) % BUFFER / 8 * 8));
}

/* --- objects ---------------------------------------------------------------------------------- */

/* mr SLOT OFFSET LENGTH ACCESS: address, rkey. */
static void reg_mr(void)
{
	int i = slot(1);
	uint8_t *at = range(2);
	regions[i] = ibv_reg_mr(pd, at, number(3), number(4));
	if (regions[i])
		answer("ok %" PRIu64 " %u", (uint64_t)(uintptr_t)at, regions[i]->rkey);
	else
		done("ibv_reg_mr", errno);
}

static void dereg_mr(void)
{
	int i = slot(1);
	int error = ibv_dereg_mr(regions[i]);
	if (!error)
		regions[i] = NULL;
	done("ibv_dereg_mr", error);
}

/* mw SLOT: a type-2 window's rkey. */
static void alloc_mw(void)
{
	int i = slot(1);
	windows[i] = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (windows[i])
		answer("ok %u", windows[i]->rkey);
	else
		done("ibv_alloc_mw", errno);
}

static void dealloc_mw(void)
{
	int i = slot(1);
	int error = ibv_dealloc_mw(windows[i]);
	if (!error)
		windows[i] = NULL;
	done("ibv_dealloc_mw", error);
}

/* qp SLOT: its number. */
static void create_qp(void)
{
	int i = slot(1);
	cqs[i] = ibv_create_cq(device, 4 * QUEUE, NULL, NULL, 0);
	if (!cqs[i]) {
		done("ibv_create_cq", errno);
		return;
	}
	struct ibv_qp_init_attr attr = {
		.send_cq = cqs[i],
		.recv_cq = cqs[i],
		.cap = { .max_send_wr = QUEUE, .max_recv_wr = QUEUE, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	qps[i] = ibv_create_qp(pd, &attr);
	if (qps[i])
		answer("ok %u", qps[i]->qp_num);
	else
		done("ibv_create_qp", errno);
}

static void destroy_qp(void)
{
	int i = slot(1);
	int error = ibv_destroy_qp(qps[i]);
	if (!error) {
		qps[i] = NULL;
		error = ibv_destroy_cq(cqs[i]);
	}
	if (!error)
		cqs[i] = NULL;
	done("destroying a queue pair", error);
}

static int gid_index(const union ibv_gid *gid)
{
	union ibv_gid entry;
	for (int i = 0; i < 64; i++)
		if (!ibv_query_gid(device, 1, i, &entry) && !memcmp(&entry, gid, sizeof entry))
			return i;
	return -1;
}

/*
 * up SLOT QPN SQ_PSN RQ_PSN MTU TIMEOUT RETRY_CNT RNR_RETRY OURS THEIRS: Reset to RTS; MTU in
 * bytes, the two addresses as IPv6 (::ffff:1.2.3.4).
 */
static void connect_qp(void)
{
	struct ibv_qp *qp = qps[slot(1)];
	union ibv_gid ours, theirs;
	if (!inet_pton(AF_INET6, word[9], &ours) || !inet_pton(AF_INET6, word[10], &theirs)) {
		answer("error no address");
		return;
	}
	/* The GID appears a little later than its address. */
	int index = gid_index(&ours);
	for (int i = 0; index < 0 && i < 10 * PATIENCE; i++) {
		usleep(100000);
		index = gid_index(&ours);
	}
	if (index < 0) {
		answer("error the device has no such GID");
		return;
	}
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
	};
	int error = ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS);
	if (error) {
		done("Reset to Init", error);
		return;
	}
	enum ibv_mtu mtu = IBV_MTU_256;
	for (uint64_t bytes = 256; bytes < number(5); bytes *= 2)
		mtu++;
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = mtu,
		.dest_qp_num = number(2),
		.rq_psn = number(4),
		.max_dest_rd_atomic = 16,
		.min_rnr_timer = 12, /* 0.64 ms */
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = theirs, .sgid_index = index, .hop_limit = 64 } },
	};
	error = ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (error) {
		done("Init to RTR", error);
		return;
	}
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = number(3),
		.timeout = number(6),
		.retry_cnt = number(7),
		.rnr_retry = number(8),
		.max_rd_atomic = 16,
	};
	done("RTR to RTS", ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
						   IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						   IBV_QP_MAX_QP_RD_ATOMIC));
}

/* --- work ------------------------------------------------------------------------------------- */

/* recv SLOT ID OFFSET LENGTH */
static void post_recv(void)
{
	struct ibv_sge sge = { (uintptr_t)range(3), number(4), everything->lkey };
	struct ibv_recv_wr wr = { .wr_id = number(2), .sg_list = &sge, .num_sge = 1 }, *bad;
	done("ibv_post_recv", ibv_post_recv(qps[slot(1)], &wr, &bad));
}

static void post(struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	wr->wr_id = number(2);
	wr->send_flags |= IBV_SEND_SIGNALED;
	done("ibv_post_send", ibv_post_send(qps[slot(1)], wr, &bad));
}

/*
 * send SLOT ID OFFSET LENGTH [imm VALUE | inv RKEY]
 * write SLOT ID OFFSET LENGTH ADDRESS RKEY [imm VALUE]
 * read SLOT ID OFFSET LENGTH ADDRESS RKEY
 */
static void post_send(void)
{
	int extra = word[0][0] == 's' ? 5 : 7;
	struct ibv_sge sge = { (uintptr_t)range(3), number(4), everything->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1 };
	const char *kind = word[extra] ? word[extra] : "";
	switch (word[0][0]) {
	case 's':
		wr.opcode = IBV_WR_SEND;
		if (!strcmp(kind, "imm"))
			wr.opcode = IBV_WR_SEND_WITH_IMM;
		else if (!strcmp(kind, "inv"))
			wr.opcode = IBV_WR_SEND_WITH_INV;
		break;
	case 'w':
		wr.opcode = *kind ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
		break;
	default:
		wr.opcode = IBV_WR_RDMA_READ;
	}
	if (wr.opcode == IBV_WR_SEND_WITH_INV)
		wr.invalidate_rkey = number(extra + 1);
	else if (*kind)
		wr.imm_data = htonl(number(extra + 1));
	if (extra == 7) {
		wr.wr.rdma.remote_addr = number(5);
		wr.wr.rdma.rkey = number(6);
	}
	post(&wr);
}

/* cas SLOT ID OFFSET ADDRESS RKEY COMPARE SWAP; faa SLOT ID OFFSET ADDRESS RKEY ADDEND */
static void post_atomic(void)
{
	struct ibv_sge sge = { (uintptr_t)buffer + number(3) % (BUFFER - 8), 8, everything->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1 };
	wr.opcode = word[0][0] == 'c' ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD;
	wr.wr.atomic.remote_addr = number(4);
	wr.wr.atomic.rkey = number(5);
	wr.wr.atomic.compare_add = number(6);
	wr.wr.atomic.swap = word[7] ? number(7) : 0;
	post(&wr);
}

/* bind SLOT ID WINDOW REGION OFFSET LENGTH ACCESS RKEY: the rights of the region must include
 * ACCESS. */
static void post_bind(void)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW };
	wr.bind_mw.mw = windows[slot(3)];
	wr.bind_mw.rkey = number(8);
	wr.bind_mw.bind_info.mr = regions[slot(4)];
	wr.bind_mw.bind_info.addr = (uintptr_t)range(5);
	wr.bind_mw.bind_info.length = number(6);
	wr.bind_mw.bind_info.mw_access_flags = number(7);
	post(&wr);
}

/* inv SLOT ID RKEY: LOCAL_INV. The window must be bound: for an unbound one, this kernel
 * crashes. */
static void post_inv(void)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = number(3) };
	post(&wr);
}

/* wait SLOT: the next completion: id, status, opcode, bytes, flags, immediate data, name of the
 * status. */
static void wait_completion(void)
{
	struct ibv_cq *cq = cqs[slot(1)];
	time_t end = time(NULL) + PATIENCE;
	struct ibv_wc wc;
	int n;
	while (!(n = ibv_poll_cq(cq, 1, &wc))) {
		if (time(NULL) > end) {
			answer("error no completion in %d s", PATIENCE);
			return;
		}
		usleep(20);
	}
	if (n < 0) {
		answer("error ibv_poll_cq");
		return;
	}
	uint32_t imm = wc.wc_flags & IBV_WC_WITH_IMM ? ntohl(wc.imm_data) : 0;
	answer("ok %" PRIu64 " %d %d %u %u %u %s", wc.wr_id, wc.status, wc.opcode, wc.byte_len,
	       wc.wc_flags, imm, ibv_wc_status_str(wc.status));
}

/* reset MARK: destroys all objects, windows first, because the kernel waits for bound windows. */
static void reset(void)
{
	for (int i = 0; i < SLOTS; i++) {
		if (windows[i])
			ibv_dealloc_mw(windows[i]);
		windows[i] = NULL;
	}
	for (int i = 0; i < SLOTS; i++) {
		if (qps[i])
			ibv_destroy_qp(qps[i]);
		if (cqs[i])
			ibv_destroy_cq(cqs[i]);
		if (regions[i])
			ibv_dereg_mr(regions[i]);
		qps[i] = NULL;
		cqs[i] = NULL;
		regions[i] = NULL;
	}
	answer("ok reset %s", word[1]);
}

/* bye: ends the program. */
static void bye(void)
{
	answer("ok");
	exit(0);
}

static const struct {
	const char *name;
	int least; /* number of words in its line */
	void (*run)(void);
} commands[] = {
	{ "fill", 4, fill },	     { "check", 4, check },	    { "hash", 3, hash },
	{ "put", 3, put },	     { "get", 2, get },		    { "mr", 5, reg_mr },
	{ "dereg", 2, dereg_mr },    { "mw", 2, alloc_mw },	    { "dealloc", 2, dealloc_mw },
	{ "qp", 2, create_qp },	     { "destroy", 2, destroy_qp },  { "up", 11, connect_qp },
	{ "recv", 5, post_recv },    { "send", 5, post_send },	    { "write", 7, post_send },
	{ "read", 7, post_send },    { "cas", 8, post_atomic },	    { "faa", 7, post_atomic },
	{ "bind", 9, post_bind },    { "inv", 4, post_inv },	    { "wait", 2, wait_completion },
	{ "reset", 2, reset },	     { "bye", 1, bye },
};

static void obey(char *line)
{
	int words = 0;
	memset(word, 0, sizeof word);
	for (char *w = strtok(line, " \r\n"); w && words < ARGUMENTS - 1; w = strtok(NULL, " \r\n"))
		word[words++] = w;
	for (size_t i = 0; words && i < sizeof commands / sizeof *commands; i++)
		if (!strcmp(word[0], commands[i].name) && words >= commands[i].least) {
			commands[i].run();
			return;
		}
	answer("error no such command, or too few words");
}

static void open_device(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	if (!list || count != 1 || !(device = ibv_open_device(list[0]))) {
		answer("error there are %d RDMA devices", count);
		exit(2);
	}
	pd = ibv_alloc_pd(device);
	if (pd && !posix_memalign((void **)&buffer, 4096, BUFFER)) {
		memset(buffer, 0, BUFFER);
		everything = ibv_reg_mr(pd, buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE);
	}
	if (!everything) {
		answer("error no protection domain, memory or region: %s", strerror(errno));
		exit(2);
	}
	answer("ok %s", ibv_get_device_name(list[0]));
}

int main(int count, char **arguments)
{
	int line = open(count > 1 ? arguments[1] : "/dev/stdin", O_RDWR | O_NOCTTY);
	struct termios raw;
	if (line < 0 || tcgetattr(line, &raw)) {
		perror("the serial line");
		return 2;
	}
	cfmakeraw(&raw);
	tcsetattr(line, TCSANOW, &raw);
	FILE *orders = fdopen(line, "r");
	answers = fdopen(dup(line), "w");
	open_device();
	char text[1024];
	while (fgets(text, sizeof text, orders))
		obey(text);
	return 1;
}
