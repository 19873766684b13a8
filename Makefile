# The tasks of this project. `make help` lists them.
#
# `build` and `quickstart` need only a Rust toolchain (see rust-version in Cargo.toml) and a C
# compiler. `test` installs more dependencies if it is allowed to.

CARGO ?= cargo
# Whole-system tests and benchmarks run the command and the library that `granary run` preloads.
# The command finds the library in its own directory.
PRODUCTS := -p granary-cli -p granary-preload
# Cargo's environment variables set the directory of the artifacts.
GRANARY := $(or $(CARGO_TARGET_DIR),$(CARGO_BUILD_TARGET_DIR),target)/release/granary
# If a test binary does not end, the runner prints its stacks and kills it.
TEST := $(CARGO) --config 'target."cfg(unix)".runner="$(CURDIR)/scripts/run-test"' test
# Where `make bench` puts records (JSON lines) and pictures (SVG and PNG).
OUT ?= out

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: toolchain
toolchain:
	@command -v $(CARGO) >/dev/null || { \
	    echo "make: no cargo; install Rust from https://rustup.rs" >&2; exit 1; }
	@command -v cc >/dev/null || { \
	    echo "make: no C compiler, which the linker and the allocator need;" \
	        "install one (Debian: apt-get install gcc libc6-dev)" >&2; exit 1; }

.PHONY: build
build: toolchain ## Build the granary command and its preload library, optimised
	$(CARGO) build --release $(PRODUCTS)

# Where `make install` puts files. DESTDIR is a folder in front of it, for packages.
PREFIX ?= /usr/local

# Needs `make build` before it, and does not build: `sudo make install` must not compile as root.
.PHONY: install
install: PRODUCT_DIRECTORY = $(dir $(GRANARY))
install: SHARE = $(DESTDIR)$(PREFIX)/share
install: ## Install the command, completions and manual pages below PREFIX (/usr/local)
	@test -x $(GRANARY) || { echo "make: no $(GRANARY); run make build" >&2; exit 1; }
	install -D $(GRANARY) $(DESTDIR)$(PREFIX)/bin/granary
	install -D -m 644 $(PRODUCT_DIRECTORY)libgranary_preload.so $(DESTDIR)$(PREFIX)/lib/libgranary_preload.so
	mkdir -p $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions \
	    $(SHARE)/fish/vendor_completions.d
	$(GRANARY) completions bash > $(SHARE)/bash-completion/completions/granary
	$(GRANARY) completions zsh > $(SHARE)/zsh/site-functions/_granary
	$(GRANARY) completions fish > $(SHARE)/fish/vendor_completions.d/granary.fish
	$(GRANARY) man $(SHARE)/man/man1

.PHONY: quickstart
quickstart: build ## Run real programs with most of their memory in a pool
	$(GRANARY) quickstart

.PHONY: test
test: toolchain ## Run unit, property and whole-system tests
	scripts/test-deps
	$(CARGO) build --release $(PRODUCTS)
	$(TEST) --workspace

.PHONY: test-full
test-full: test ## Run more and longer tests, tests with Linux's soft-RoCE in qemu, and all tests on a single core
	GRANARY_TEST_FULL=1 scripts/test-deps
	# Optimised, but without LTO, which would compile everything again for each test binary.
	PROPTEST_CASES=4096 GRANARY_TEST_FULL=1 CARGO_PROFILE_RELEASE_LTO=off \
	    TEST_SECONDS=3600 $(TEST) --workspace --release
	# Prints the times of the pager's policies and prefetcher, one test after the other.
	CARGO_PROFILE_RELEASE_LTO=off $(TEST) -p granary-pager --release --lib cost_of_ -- \
	    --ignored --nocapture --test-threads 1
	CARGO_PROFILE_RELEASE_LTO=off $(TEST) -p granary-heap -p granary-kv --release --test cost -- \
	    --ignored --nocapture
	TEST_SECONDS=1800 taskset -c 0 $(TEST) --workspace
	GRANARY_TEST_UNPRIVILEGED=1 $(TEST) --workspace --test pager_forks
	# The way of kernels that cannot move pages.
	GRANARY_PAGES=copy TEST_SECONDS=1800 $(TEST) -p granary-tests --test 'pager_*' --test pool_resident
	# Sealed pages. Hidden places need more chunks than the tests of utilization allow.
	GRANARY_SEAL=aes-256-gcm TEST_SECONDS=1800 $(TEST) -p granary-tests --test 'pager_*'
	GRANARY_SEAL=aes-128-gcm GRANARY_HIDE=reads TEST_SECONDS=1800 $(TEST) -p granary-tests \
	    --test pager_forks --test pager_direct --test pager_run --test pager_programs
	# All benchmarks in full, with the build of the tests above. Pictures go to a temporary directory.
	out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	    $(MAKE) --no-print-directory benchmarks OUT="$$out"

# Seconds for each target of `make fuzz`.
FUZZ_SECONDS ?= 600

.PHONY: fuzz
fuzz: toolchain ## Fuzz every target, FUZZ_SECONDS each (docs/internals/testing.md)
	@for target in $(basename $(notdir $(wildcard fuzz/tests/*.rs))); do \
	    scripts/fuzz $$target $(FUZZ_SECONDS) || exit 1; \
	done

.PHONY: miri
miri: export MIRIFLAGS = -Zmiri-disable-isolation -Zmiri-permissive-provenance
miri: export PROPTEST_CASES = 8
# Without authenticated packets: a library in C and assembly computes their tags.
miri: toolchain ## Run unsafe code under Miri, about an hour (needs: rustup +nightly component add miri)
	$(CARGO) +nightly miri test --target-dir target/miri \
	    -p granary-rnic --lib -- engine:: dma:: queue:: table:: protection:: \
	    --skip chain_serves --skip tests::model --skip tests::fairness \
	    --skip wire::forged --skip authenticated
	# With the CPU features that the checksums of payloads need.
	RUSTFLAGS=-Ctarget-feature=+avx2,+pclmulqdq,+vpclmulqdq $(CARGO) +nightly miri test --target-dir target/miri \
	    -p granary-rnic --lib -- crc:: wire::icrc:: wire::outbox::
	$(CARGO) +nightly miri test --target-dir target/miri \
	    -p granary-verbs --lib -- completion::slab direct:: psn::
	# Without the calls to aws-lc, which is C and assembly.
	$(CARGO) +nightly miri test --target-dir target/miri -p granary-seal --lib -- generations::

.PHONY: tsan
tsan: toolchain ## Run tests with threads under ThreadSanitizer (needs: rustup +nightly component add rust-src)
	scripts/tsan

.PHONY: planted
planted: toolchain ## Plant bugs in a copy of the tree, which tests and the simulator must find (long)
	scripts/planted-bugs
	scripts/planted-bugs --sim

.PHONY: mutants
mutants: toolchain ## Run mutation tests of the trusted parts, or of FILE=crates/... (hours)
	scripts/mutants $(FILE)

.PHONY: bench
bench: build ## Run all benchmarks of this machine, print tables, write pictures to $(OUT)
	@$(MAKE) --no-print-directory benchmarks OUT=$(OUT)

# Without building the command.
.PHONY: benchmarks
benchmarks:
	$(GRANARY) bench access --out $(OUT)
	$(GRANARY) bench alloc --nic shm --out $(OUT)
	$(GRANARY) bench alloc --nic inline --clients 1 --out $(OUT)/inline
	$(GRANARY) bench fault --out $(OUT)
	$(GRANARY) bench seal
	$(GRANARY) bench lease
	$(GRANARY) bench kv --keys 20000 --out $(OUT)
	$(GRANARY) bench paper onesidedmw --out $(OUT)
	$(GRANARY) bench paper finemem --out $(OUT)

.PHONY: lint
lint: toolchain ## Check formatting, clippy and rustdoc warnings, and dependencies (cargo-deny)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	@if ! command -v cargo-deny >/dev/null; then \
	    echo "lint: cargo-deny is not installed, dependencies are not checked" \
	        "(cargo install --locked cargo-deny)"; \
	elif $(CARGO) deny fetch db 2>/dev/null; then \
	    $(CARGO) deny check; \
	else \
	    echo "lint: the advisory database cannot be fetched, advisories are not checked"; \
	    $(CARGO) deny check bans licenses sources; \
	fi

.PHONY: tidy
tidy: toolchain ## Check wording, line lengths and links (docs/style.md)
	$(CARGO) test -p granary-tidy
