# Two commands do everything: `make demo` (the whole main job on the embedded box) and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    := $(BIN)/invoke
# A file stays with one worker: its sandbox and its deployed payload are made once. The longest come first (testpaths).
WORKERS  ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Shows a command as a person would type it, then runs it.
say = @printf '\n\033[1m$$ %s\033[0m\n' "invoke $(1)" | { [ -t 1 ] && [ -z "$$NO_COLOR" ] && cat || sed 's/\x1b\[[0-9;]*m//g'; }

# Of pip's two hundred lines those that take their time, as they come.
WORTH_SEEING = sed -un -e 's/^ *\(Downloading\|Using cached\) \([^ ]*\) (\(.* MB\)).*/  \3  \2/p' \
  -e 's/^ *\(Building wheel for [^ ]*\) .*started$$/  \1/p' -e 's/^Installing collected packages.*/  installing all of them/p' \
  -e 's/^Successfully installed.*/  done/p'

.PHONY: demo test check format env system model clean help

help:
	@echo "make demo    environment, embedded box, real small model, the whole main job (ten minutes the first time, then five;"
	@echo "             ten more on cores without AMX, longer beside other work: it says how long)"
	@echo "make test    lint, types and every test"
	@echo "make check   lint and types only"
	@echo "make clean   stop the embedded box, delete it and the environment"

demo: env system model
	$(call say,deploy)
	@$(RUN) deploy
	$(call say,restart --fresh-cache --from-scratch)
	@$(RUN) restart --fresh-cache --from-scratch
	$(call say,wait --until healthy)
	@$(RUN) wait --until healthy
	$(call say,status)
	@$(RUN) status
	$(call say,abort)
	@$(RUN) abort
	$(call say,status)
	@$(RUN) status || [ $$? -eq 5 ]
	$(call say,restart)
	@$(RUN) restart
	$(call say,wait --until finished --timeout 7200)
	@$(RUN) wait --until finished --timeout 7200
	$(call say,status)
	@$(RUN) status

test: env system model check
	$(BIN)/python -m pytest $(PARALLEL)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(STAMP)

# A stamp instead of a rule per package: pip decides what is missing.
$(STAMP): pyproject.toml remote_payload/constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pctrun needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) -V). Name another one: make PYTHON=python3.12 demo" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory system
	@echo "environment: $(VENV) (PyTorch, transformers and the controller; some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@[ -e /dev/nvidiactl ] || $(BIN)/python -m pip config list 2>/dev/null | grep -qE 'index-url|find-links' \
	  || echo "  no GPU here, and pip knows PyPI alone: with PyTorch's CPU index in PIP_EXTRA_INDEX_URL it would be 2.5 GB less"
	@rm -f $@
	@{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	  --constraint remote_payload/constraints-cpu.txt --editable '.[sandbox,payload,plot,dev]' && touch $@; } \
	  | $(WORTH_SEEING); [ -e $@ ]

# tmux and bubblewrap carry the embedded box; python3-venv only where Debian split it off. Its second engine is for the tests alone: only
# root can use it, and where systemd runs, these packages would start services (sshd, a bridge) that nobody has asked for.
test: SECOND_ENGINE := lxc-start=lxc debootstrap=debootstrap /usr/sbin/sshd=openssh-server sudo=sudo
system:
	@missing=""; \
	command -v tmux  >/dev/null || missing="$$missing tmux"; \
	command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ "$$(id -u)" = 0 ]; then as=""; \
	elif sudo -n true 2>/dev/null; then as="sudo -n"; \
	elif [ -n "$$missing" ]; then echo "the embedded box needs:$$missing. Install with: sudo apt-get install -y$$missing" >&2; exit 1; fi; \
	install() { \
	  echo "system packages:$$1"; \
	  { $$as apt-get install -y -qq $$* || { $$as apt-get update -qq && $$as apt-get install -y -qq $$*; }; } >/dev/null; }; \
	[ -z "$$missing" ] || install "$$missing" || exit 1; \
	more=""; \
	for each in $(SECOND_ENGINE); do command -v "$${each%=*}" >/dev/null || more="$$more $${each#*=}"; done; \
	if [ -n "$$more" ] && [ "$$(id -u)" = 0 ] && [ ! -d /run/systemd/system ]; then \
	  install "$$more" --no-install-recommends || echo "tests on LXC are skipped: these packages cannot be had" >&2; fi

model: env
	@$(RUN) sandbox.model

clean:
	@[ ! -x $(RUN) ] || $(RUN) sandbox.down --wipe --yes || true
	rm -rf $(VENV) .sandbox
