"""The live page: it follows the run, and it answers this machine alone, by two addresses, without writing."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_cases import append_epoch, make_run

from bicovg.cli import main
from bicovg.errors import UserError
from bicovg.report.collect import read_run
from bicovg.tensorboard import EventWriter, scalars
from bicovg.watch import Server, open_server

EXITS = [0, 1, 2, 3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", epochs=6, done=2)


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server(run, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: Server, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_a_new_epoch_changes_the_page(server: Server, run: Path) -> None:
    first = ask(server, "/live")
    assert "2 / 6" in first.body  # type: ignore[attr-defined]
    tag = first.headers["ETag"]
    same = ask(server, "/live", If_None_Match=tag)
    assert (same.status, same.body) == (304, "")  # type: ignore[attr-defined]
    append_epoch(run, 2, 6, EXITS)
    fresh = ask(server, "/live", If_None_Match=tag)
    assert fresh.status == 200
    assert "3 / 6" in fresh.body  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "path",
    [
        "/config.json",
        "/../config.json",
        "/../../../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/./",
        "/live/../config.json",
        "/checkpoints/",
        "/?file=/etc/passwd",
        "etc/passwd",
        "http://127.0.0.1/",
        "/\\..\\..\\etc\\passwd",
    ],
)
def test_no_other_path_is_served(path: str, server: Server) -> None:
    answer = ask(server, path)
    assert answer.status == 404
    assert answer.body == "there is the page, and nothing else\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.7", "", "0.0.0.0"]
)
def test_a_foreign_host_name_is_refused(host: str, server: Server) -> None:
    assert ask(server, "/", Host=host).status == 403
    assert ask(server, "/live", Host=host).status == 403


def test_this_machine_by_either_name_is_answered(server: Server) -> None:
    port = server.server_address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost"):
        assert ask(server, "/", Host=host).status == 200


def test_the_server_listens_on_the_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent: this only finds the outward address
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        address = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no address but its loopback")
    with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
        socket.create_connection((address, server.server_address[1]), timeout=2)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_allowed(method: str, server: Server, run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert ask(server, "/", method).status == 405
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_looking_writes_nothing(server: Server, run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    ask(server, "/")
    ask(server, "/live")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_headers_forbid_what_the_page_does_not_need(server: Server) -> None:
    headers = ask(server, "/").headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers
    head = ask(server, "/", "HEAD")
    assert (head.status, head.body) == (200, "")  # type: ignore[attr-defined]


def test_a_file_damaged_on_the_way_leaves_the_last_page(server: Server, run: Path) -> None:
    ask(server, "/")
    (run / "env.json").write_text("{")
    answer = ask(server, "/")
    assert answer.status == 200
    assert "2 / 6" in answer.body  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", ["garbage", "{}", '{"epoch": "x", "lr": 1, "loss": [1, 1, 1, 1]}'])
def test_a_damaged_line_is_named_above_the_last_state_until_it_is_gone(line: str, server: Server, run: Path) -> None:
    metrics, tag = run / "metrics.jsonl", ask(server, "/live").headers["ETag"]
    good = metrics.read_text()
    metrics.write_text(good + line + "\n")
    answer = ask(server, "/live", If_None_Match=tag)
    assert answer.status == 200
    assert "2 / 6" in answer.body  # type: ignore[attr-defined]
    assert 'role="alert"' in answer.body  # type: ignore[attr-defined]
    assert "the last state that could be read" in answer.body  # type: ignore[attr-defined]
    assert ask(server, "/live", If_None_Match=answer.headers["ETag"]).status == 304
    metrics.write_text(good)
    assert 'role="alert"' not in ask(server, "/live").body  # type: ignore[attr-defined]


def test_a_link_out_of_the_run_folder_is_not_followed(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"device": "secret"}))
    (run / "env.json").unlink()
    (run / "env.json").symlink_to(secret)
    with pytest.raises(UserError, match="leads out of the run folder"):
        Server(run, 0)


def test_a_taken_port_is_refused_when_named_and_replaced_when_not(server: Server, run: Path) -> None:
    taken = server.server_address[1]
    with pytest.raises(UserError, match=f"port {taken} cannot be used"):
        open_server(run, taken)
    with open_server(run, None) as one, open_server(run, None) as other:
        assert one.server_address != other.server_address


def test_wrong_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["watch", str(tmp_path / "nowhere")],
        ["watch", str(tmp_path)],
        ["watch", str(tmp_path), "--port", "x"],
    ):
        assert main(words) == 2
        (sentence,) = capsys.readouterr().err.strip().splitlines()
        assert sentence.startswith("bicovg: ")


def test_the_command_serves_shows_epochs_and_ends_on_interrupt(run: Path) -> None:
    words = [sys.executable, "-m", "bicovg", "watch", str(run), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line
        assert "scope strict" in process.stdout.readline()
        assert process.stdout.readline().startswith("epoch 2/6")
        append_epoch(run, 2, 6, EXITS)
        assert process.stdout.readline().startswith("epoch 3/6")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode in (0, 130), out + err
        assert "Traceback" not in err


def test_the_command_outlives_a_damaged_line(run: Path) -> None:
    words = [sys.executable, "-m", "bicovg", "watch", str(run), "--port", "0"]
    metrics = run / "metrics.jsonl"
    good = metrics.read_text()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        while not next(lines, "epoch 2/6").startswith("epoch 2/6"):
            pass
        metrics.write_text(good + "garbage\n")
        assert "line 3 of" in next(lines, "")
        metrics.write_text(good)
        append_epoch(run, 2, 6, EXITS)
        assert next(lines, "").startswith("epoch 3/6")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) in ((0, ""), (130, "")), out + err


def test_event_files_hold_every_epoch_once(run: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventWriter(tmp_path / "events")
    events.record(read_run(run))
    events.record(read_run(run))  # nothing is new
    append_epoch(run, 2, 6, EXITS)
    events.record(read_run(run))
    events.close()
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    top1 = found.Scalars("top1/block 3")
    assert [event.step for event in top1] == [1, 2, 3]
    expected = [record["top1"][3] for record in read_run(run).metrics]
    assert [event.value for event in top1] == pytest.approx(expected, rel=1e-6)
    assert {"lr", "loss/block 0", "images_per_second"} <= set(found.Tags()["scalars"])


def test_scalars_name_blocks_and_leave_words_out() -> None:
    line = {"epoch": 3, "step": 9, "lr": 0.1, "split": "test", "loss": [1.0, 2.0]}
    expected = {"lr": 0.1, "loss/block 1": 1.0, "loss/block 3": 2.0}
    assert dict(scalars(line, [1, 3])) == expected
    later = {**line, "names": ["a", "b"], "by_class": [1.0, 2.0, 3.0]}  # fields that a later version may add
    assert dict(scalars(later, [1, 3])) == expected
