"""Run the whole stack: every way in which it must start, and every way in which it cannot.

It takes a Docker engine with Compose, about ten minutes and free ports of its own. The stack is
started from a copy of the checkout, under another project's name: a stack of yours that runs, its
volumes and `docker/.env` stay as they are. Nothing is left behind but the service's image. Exit
status 1 if something is wrong; 0 with one line where there is no Docker.
"""
# ruff: noqa: INP001, PLR2004, S603, T201 - a program that runs others, and says what it found

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

ROOT = Path(__file__).resolve().parent.parent
# In the checkout: an engine that is not on this machine sees the files of few other folders.
COPY = ROOT / ".stack-test"
SETTINGS = COPY / "docker" / ".env"
PROJECT = "langchain-quota-test"
IMAGE = "langchain-quota-agent"
DOCKER = os.environ.get("DOCKER") or "docker"

PORTS = (
    "AGENT_1_PORT",
    "AGENT_2_PORT",
    "GRAFANA_PORT",
    "PROMETHEUS_PORT",
    "ALERTMANAGER_PORT",
    "WEBHOOK_PORT",
)
ALERT = "LangChainQuotaLimitBreached"
SECRETS = {
    "METRICS_TOKEN": r"""t0ken:"$HOME"/#%&\with=all&kinds""",
    "POSTGRES_PASSWORD": r"""p@ss: w/rd #%$HOME"\é?&=""",
    "REDIS_PASSWORD": r"""--p@ss: w/rd #%$HOME"\é?&=""",
}
"""Every character that means something in a URL, a shell or a file of settings."""

WRITABLE = {"prometheus"}
"""Compose cannot write a secret into a container with a read-only root."""

MAKE_SECONDS = 900
ALERT_SECONDS = 240


class Failed(Exception):  # noqa: N818 - it ends the test, with what is wrong
    """Something is not as it has to be."""


def expect(fulfilled: object, what: str) -> None:
    """Print what is as it should be, or end with what is not."""
    if not fulfilled:
        raise Failed(what)
    print(f"ok: {what}", flush=True)


# What is run.


def environment() -> dict[str, str]:
    """This process's, without settings of the stack: those of the file hold."""
    dropped = {*PORTS, *SECRETS, "LOAD_SECONDS", "BASE_IMAGE", "PIP_CONF", "ENV_FILE"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith(("MAKE", "MFLAGS", "COMPOSE_"))
    }
    return {**kept, "COMPOSE_PROJECT_NAME": PROJECT, "DOCKER": DOCKER}


def run(*command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, and keep what it says."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=MAKE_SECONDS,
        env=environment(),
        **options,
    )
    if check and done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{tail(done)}")
    return done


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a command said."""
    return "\n".join((done.stdout + done.stderr).splitlines()[-40:])


def make(target: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a target of the copy's Makefile, and say how long it took."""
    started = time.monotonic()
    done = run("make", target, f"DOCKER={DOCKER}", *arguments, cwd=COPY, check=check)
    print(f"    make {target}: {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
    return done


def docker(*arguments: str) -> str:
    """What a command of Docker says."""
    return run(DOCKER, *arguments).stdout


def docker_answers() -> bool:
    """Whether there is an engine, and Compose."""
    if shutil.which(DOCKER) is None:
        return False
    asked = ("compose", "version"), ("info",)
    return not any(run(DOCKER, *each, check=False).returncode for each in asked)


def compose(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of Compose on the copy's stack."""
    file = COPY / "docker" / "compose.yaml"
    words = ("compose", "--file", str(file), "--env-file", str(SETTINGS), *arguments)
    return run(DOCKER, *words, check=check)


def ask(url: str, body: Mapping[str, str] | None = None) -> tuple[int, str]:
    """An HTTP status, 0 for none, and the answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-forwarded-user": "me"}
    request = Request(url, data, headers)  # noqa: S310 - our own
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=30) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except (URLError, OSError) as error:
        return 0, str(error)


def eventually(what: str, found: Callable[[], object], seconds: float = ALERT_SECONDS) -> None:
    """Wait for something, but not for ever."""
    started = time.monotonic()
    while not found():
        if time.monotonic() - started > seconds:
            raise Failed(f"not within {seconds:.0f} seconds: {what}")
        time.sleep(1)
    print(f"ok: {what}, after {time.monotonic() - started:.0f} s", flush=True)


# The copy, and its settings.


def copy_checkout() -> None:
    """The files that git knows, as a clone under umask 077 has them."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, COPY / name
        if source.is_file():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o600)


def free_ports() -> dict[str, str]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    found = {name: str(each.getsockname()[1]) for name, each in zip(PORTS, sockets, strict=True)}
    for each in sockets:
        each.close()
    return found


def change(text: str, **settings: str) -> str:
    """Settings with other values, in single quotes."""
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in settings]
    return "\n".join([*kept, *(f"{name}='{value}'" for name, value in settings.items()), ""])


# What is tried.


def comes_up(urls: Mapping[str, str]) -> None:
    """`make up` ends with 0, prints the addresses, and everything answers there."""
    done = make("up")
    expect(
        all(url in done.stdout for url in urls.values()), "make up ends with 0 and the addresses"
    )
    pages = {
        "AGENT_1_PORT": "/readyz",
        "AGENT_2_PORT": "/readyz",
        "GRAFANA_PORT": "/api/health",
        "PROMETHEUS_PORT": "/-/ready",
        "ALERTMANAGER_PORT": "/-/ready",
        "WEBHOOK_PORT": "/",
    }
    for name, path in pages.items():
        status, answer = ask(urls[name] + path)
        expect(status == 200, f"{name} answers {path}" + ("" if status == 200 else f": {answer}"))


def is_contained() -> None:
    """No container has rights, memory, logs or volumes that it does not need."""
    found = json.loads(docker("inspect", *compose("ps", "--all", "--quiet").stdout.split()))
    expect(len(found) > 8, f"{len(found)} containers are there")
    wrong = []
    for each in found:
        service = each["Config"]["Labels"]["com.docker.compose.service"]
        host = each["HostConfig"]
        volumes = [mount for mount in each["Mounts"] if mount["Type"] == "volume"]
        holds = {
            "drops all rights": host["CapDrop"] == ["ALL"],
            "gains no new ones": "no-new-privileges:true" in host["SecurityOpt"],
            "has a read-only root": host["ReadonlyRootfs"] or service in WRITABLE,
            "has bounded memory": host["Memory"] > 0,
            "has bounded processors": host["NanoCpus"] > 0,
            "has bounded processes": (host["PidsLimit"] or 0) > 0,
            "rotates its logs": "max-size" in host["LogConfig"]["Config"],
            "has no volume": not volumes or each["Config"]["Image"] != IMAGE,
            "publishes on loopback only": all(
                binding["HostIp"] == "127.0.0.1"
                for bindings in (host["PortBindings"] or {}).values()
                for binding in bindings
            ),
        }
        wrong += [f"{service} {what}" for what, held in holds.items() if not held]
    expect(not wrong, "every container is confined" + (f", but not: {wrong}" if wrong else ""))
    ping = ("exec", "-T", "--env", "REDISCLI_AUTH=", "redis", "redis-cli", "ping")
    expect("PONG" not in compose(*ping, check=False).stdout, "Redis asks for its password")


def blocks_and_alerts(urls: Mapping[str, str]) -> None:
    """A call is blocked, Prometheus sees it, and the alert arrives at the webhook."""
    words = {"text": "one two three four five six seven eight nine"}
    status, answer = ask(f"{urls['AGENT_1_PORT']}/threads/mine/messages", words)
    expect(status == 403 and json.loads(answer)["detail"]["limit"] == "model", "a call is blocked")
    answer = ask(f"{urls['AGENT_2_PORT']}/threads/mine/messages", {"text": "one"})[1]
    usage = json.loads(ask(f"{urls['AGENT_2_PORT']}/threads/mine/usage")[1])
    expect(
        usage["thread"]["model"] == 8 + 2, f"the other replica goes on counting: {answer}, {usage}"
    )
    query = "/api/v1/query?query=count(langchain_quota_calls_total%7Bdecision=%22blocked%22%7D)"
    eventually(
        "Prometheus has scraped it, with the token",
        lambda: '"value"' in ask(urls["PROMETHEUS_PORT"] + query)[1],
    )
    eventually(
        f"Alertmanager has {ALERT}",
        lambda: ALERT in ask(f"{urls['ALERTMANAGER_PORT']}/api/v2/alerts")[1],
    )
    eventually("the webhook has it, too", lambda: ALERT in ask(urls["WEBHOOK_PORT"])[1])


def recovers(urls: Mapping[str, str]) -> None:
    """After a crash `make up` starts the crashed services again."""
    # Alertmanager, because the webhook lives in its network; Redis, because the agents need it.
    compose("kill", "agent-1", "redis", "alertmanager")
    comes_up(urls)


def keeps_counts(urls: Mapping[str, str], volumes: set[str]) -> None:
    """What a thread has used outlives `make down`; volumes without a name do not."""
    usage = f"{urls['AGENT_2_PORT']}/threads/mine/usage"
    before = json.loads(ask(usage)[1])["thread"]
    make("down")
    nameless = {name for name in all_volumes() - volumes if not name.startswith(f"{PROJECT}_")}
    expect(not nameless, "down leaves no volume without a name" + f": {nameless}" * bool(nameless))
    comes_up(urls)
    after = json.loads(ask(usage)[1])["thread"]
    expect(before == after and before["model"] > 0, f"down and up keep the counts: {after}")


def says_why(what: str, good: str, wrong: Mapping[str, str], *said: str) -> None:
    """With wrong settings `make up` fails, with a report."""
    make("down")
    SETTINGS.write_text(change(good, **wrong))
    done = make("up", check=False)
    SETTINGS.write_text(good)
    text = done.stdout + done.stderr
    expect(done.returncode != 0 and "The stack does not run." in text, f"{what}: make up fails")
    for each in said:
        expect(
            each in text, f"{what}: it says {each!r}" + f", but only:\n{text}" * (each not in text)
        )


def reports(good: str) -> None:
    """For every way in which the stack cannot start, one sentence says why."""
    setting = "A setting in docker/.env is wrong"
    says_why("no secret", good, {"METRICS_TOKEN": ""}, "METRICS_TOKEN", setting)
    says_why(
        "a short token",
        good,
        {"METRICS_TOKEN": "short"},
        "ends again and again",
        "METRICS_TOKEN is wrong",
        setting,
    )
    says_why(
        "another password",
        good,
        {"POSTGRES_PASSWORD": "another"},
        "POSTGRES_PASSWORD in docker/.env is not the one that the database was made with",
    )
    says_why("seconds that are none", good, {"LOAD_SECONDS": "many"}, "load has ended", setting)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        says_why(
            "a port that is taken",
            good,
            {"PROMETHEUS_PORT": port},
            f"Port {port} is in use: choose another one for PROMETHEUS_PORT in docker/.env",
        )


def takes_an_index(good: str) -> None:
    """The build takes packages from where PIP_CONF says, and no layer keeps that file."""
    config = COPY / "docker" / "pip.conf"
    config.write_text("[global]\nindex-url = http://127.0.0.1:9/of-my-own\nretries = 0\n")
    SETTINGS.write_text(change(good, PIP_CONF="./pip.conf"))
    done = compose("build", "--no-cache", "agent-1", check=False)
    text = done.stdout + done.stderr
    expect(done.returncode != 0 and "of-my-own" in text, "PIP_CONF names the index of the build")
    SETTINGS.write_text(good)
    history = docker("history", "--no-trunc", IMAGE)
    expect("of-my-own" not in history, "the image does not know that index")


def all_volumes() -> set[str]:
    """The names of the engine's volumes; those without a name have a long number."""
    return set(docker("volume", "ls", "--quiet").split())


def left_behind() -> list[str]:
    """What of the stack is still there."""
    label = f"label=com.docker.compose.project={PROJECT}"
    kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
    return [
        found for kind in kinds for found in docker(*kind, "--quiet", "--filter", label).split()
    ]


def try_all() -> None:
    """Everything, in an order that spares waiting."""
    volumes = all_volumes()
    copy_checkout()
    make("docker/.env")
    expect(SETTINGS.stat().st_mode & 0o777 == 0o600, "make writes settings that nobody else reads")
    ports = free_ports()
    good = change(SETTINGS.read_text(), **ports, **SECRETS, LOAD_SECONDS="600")
    SETTINGS.write_text(good)
    urls = {name: f"http://localhost:{port}" for name, port in ports.items()}
    try:
        print("A clone under umask 077, with secrets of all kinds of characters:", flush=True)
        comes_up(urls)
        is_contained()
        blocks_and_alerts(urls)
        print("Up again, after a crash, and after down:", flush=True)
        comes_up(urls)
        recovers(urls)
        keeps_counts(urls, volumes)
        print("What cannot come up:", flush=True)
        reports(good)
        takes_an_index(good)
    except Failed:
        print(compose("ps", "--all", check=False).stdout, file=sys.stderr)
        raise
    finally:
        SETTINGS.write_text(good)
        make("down", "ARGS=--volumes", check=False)
    expect(not left_behind(), "make down ARGS=--volumes leaves nothing behind")
    new = all_volumes() - volumes
    expect(not new, "no volume is left" + f", but: {new}" * bool(new))


def main() -> int:
    """Try it, where there is Docker."""
    if not docker_answers():
        print("Docker with Compose was not found: the stack is not tested.")
        return 0
    started = time.monotonic()
    try:
        try_all()
    except (Failed, subprocess.TimeoutExpired) as failed:
        print(f"The stack is not as it should be: {failed}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(COPY, ignore_errors=True)
    print(f"The stack holds, after {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
