"""Lists of runs, sessions and checkpoints, against what was put there."""

from __future__ import annotations

import urllib.parse

import pytest

from fppo.serve.tinker.checkpoints import CheckpointMeta, time_of
from fppo.serve.tinker.runs import Adapters
from fppo.serve.tinker.sessions import ClientSession, Sampler, owner_of
from fppo.serve.tinker.training import RunInfo
from tests.serve.tinker.served import KEY, LIMIT, OTHER, base, served

ME, YOU = owner_of(KEY), owner_of(OTHER)
ADAPTERS = Adapters(rank=3, attention=False, mlp=True, unembed=False)
NOW = [1e9]


def session_of(name, owner, created, **more):
    return ClientSession(name=name, owner=owner, created=created, **more)


def run_of(session, number, owner, **more):
    own = {"name": f"{session}:train:{number}", "session": session, "owner": owner, "created": 100.0 + number}
    return RunInfo(**own, **({"base": "tiny", "adapters": ADAPTERS, "optimizer": "adamw"} | more))


def saved(service, run, kind, name, number, *, owner=ME, size=10, expires=None):
    meta = CheckpointMeta(
        run=run,
        kind=kind,
        name=name,
        owner=owner,
        base="tiny",
        adapters=ADAPTERS,
        optimizer="muon",
        number=number,
        created=200.0 + number,
        data=f"data-{number}",
        expires=expires,
    )
    folder = service.checkpoints.data(meta)
    (folder / "files" / "deep").mkdir(parents=True)
    (folder / "files" / "deep" / "a b.bin").write_bytes(bytes(size))
    return service.checkpoints.commit(meta)


SESSIONS = ("01234567-1111", "01234567-2222", "01234567-3333")
FIRST, SECOND = f"{SESSIONS[0]}:train:0", f"{SESSIONS[1]}:train:1"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with served(tmp_path_factory.mktemp("shown"), [base()], clock=lambda: NOW[0]) as found:
        registry, runs = found.service.registry, found.service.runs
        registry.add_session(session_of(SESSIONS[0], ME, 10.0, display_name="Blue Lamp", metadata={"a": "1", "b": "2"}))
        registry.add_session(session_of(SESSIONS[1], ME, 20.0, display_name="blue door", metadata={"a": "1"}))
        registry.add_session(session_of(SESSIONS[2], YOU, 30.0, display_name="blue lamp"))
        registry.finish(SESSIONS[1], ME, "errored")
        runs.create(run_of(SESSIONS[0], 0, ME, metadata={"x": "y"}))
        runs.create(run_of(SESSIONS[1], 1, ME, adapters=Adapters(rank=0), optimizer="muon"))
        runs.create(run_of(SESSIONS[2], 2, YOU))
        for number in range(2):
            name = f"{SESSIONS[number]}:sample:{number}"
            path = f"tinker://{FIRST}/weights/b" if number else None
            weights = "path" if number else "base"
            registry.add_sampler(Sampler(name=name, owner=ME, base="tiny", weights=weights, path=path))
        for place, (kind, name) in enumerate(
            [("weights", "a"), ("sampler_weights", "s"), ("weights", "b"), ("external_weights", "x")]
        ):
            saved(found.service, FIRST, kind, name, place, size=10 + place)
        yield found


def answered(host, path, *, key=KEY):
    response = host.get(path, key=key)
    assert response.status_code == 200, response.text
    return response.json()


def test_runs_are_shown_with_their_last_checkpoints_a_page_at_a_time(host):
    shown = answered(host, "training_runs")
    assert shown["cursor"] == {"offset": 0, "limit": 20, "total_count": 2}
    second, first = shown["training_runs"]
    last = first.pop("last_checkpoint"), first.pop("last_sampler_checkpoint")
    assert [each["tinker_path"] for each in last] == [
        f"tinker://{FIRST}/weights/b",
        f"tinker://{FIRST}/sampler_weights/s",
    ]
    assert first == {
        "training_run_id": FIRST,
        "base_model": "tiny",
        "model_owner": ME,
        "is_lora": True,
        "lora_rank": 3,
        "last_request_time": time_of(1e9),
        "user_metadata": {"x": "y"},
    }
    assert (second["is_lora"], second["lora_rank"], second["last_checkpoint"]) == (False, None, None)
    assert answered(host, f"training_runs/{SECOND}") == second
    for query, names, cursor in (
        ("limit=1&offset=1", [FIRST], (1, 1)),
        ("limit=1", [SECOND], (0, 1)),
        ("offset=2&limit=5000", [], (2, 1000)),
    ):
        page = answered(host, f"training_runs?{query}")
        assert [each["training_run_id"] for each in page["training_runs"]] == names
        assert page["cursor"] == dict(zip(("offset", "limit"), cursor, strict=True)) | {"total_count": 2}
    assert host.get("training_runs?limit=-1").status_code == 400
    assert host.get(f"training_runs/{FIRST}", key=OTHER).status_code == 404


def test_sessions_are_shown_and_found_by_name_words_and_metadata(host):
    assert answered(host, "sessions") == {"sessions": [SESSIONS[1], SESSIONS[0]]}
    assert answered(host, "sessions?limit=1&offset=1") == {"sessions": [SESSIONS[0]]}
    for number, name in enumerate(SESSIONS[:2]):
        shown = answered(host, f"sessions/{name}")
        assert shown["training_run_ids"] == [f"{name}:train:{number}"]
        assert shown["sampler_ids"] == [f"{name}:sample:{number}"]
    assert host.get(f"sessions/{SESSIONS[2]}").status_code == 404

    def found(**fields):
        response = host.post("sessions/search", fields)
        assert response.status_code == 200, response.text
        return [each["session_id"] for each in response.json()["sessions"]]

    assert found() == [SESSIONS[1], SESSIONS[0]]
    assert found(limit=1) == [SESSIONS[1]]
    assert found(display_name="LAMP blue") == [SESSIONS[0]]
    assert found(session_id=SESSIONS[0]) == [SESSIONS[0]]
    assert found(session_id="other", display_name="door") == [SESSIONS[1]]
    assert found(user_metadata={"a": "1"}) == [SESSIONS[1], SESSIONS[0]]
    assert found(user_metadata={"a": "1", "b": "2"}) == [SESSIONS[0]]
    assert found(display_name="door", user_metadata={"b": "2"}) == []
    assert host.post("sessions/search", {"limit": 0}).status_code == 400
    second, first = host.post("sessions/search", {}).json()["sessions"]
    assert first == {
        "session_id": SESSIONS[0],
        "created_at": time_of(10.0),
        "owner": ME,
        "project_id": "",
        "status": {"type": "active"},
        "checkpoints_count": 4,
        "display_name": "Blue Lamp",
        "user_metadata": {"a": "1", "b": "2"},
        "checkpoint_storage_bytes": 10 + 11 + 12 + 13,
    }
    assert second["status"] == {"type": "client_finished", "reason": {"type": "errored"}}
    assert (second["checkpoints_count"], second["checkpoint_storage_bytes"]) == (0, 0)


def test_samplers_and_models_are_shown(host):
    name = f"{SESSIONS[1]}:sample:1"
    path = f"tinker://{FIRST}/weights/b"
    assert answered(host, f"samplers/{name}") == {"sampler_id": name, "base_model": "tiny", "model_path": path}
    assert host.get(f"samplers/{name}", key=OTHER).status_code == 404
    models = answered(host, "get_server_capabilities")["supported_models"]
    own = {"model_name": "tiny", "max_context_length": LIMIT, "trainable": True, "sampleable": True}
    assert models == [own]
    told = host.post("weights_info", {"tinker_path": path}).json()
    assert told == {
        "base_model": "tiny",
        "optimizer_config": {"type": "muon"},
        "is_lora": True,
        "lora_rank": 3,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": False,
    }
    info = host.post("get_info", {"model_id": SECOND}).json()
    assert (info["is_lora"], info["lora_rank"], info["optimizer_config"]) == (False, None, {"type": "muon"})
    assert info["model_data"]["tokenizer_id"] == "nowhere"


def test_checkpoints_are_listed_published_and_given_a_time(host):
    paths = [f"tinker://{FIRST}/{x}" for x in ("weights/a", "sampler_weights/s", "weights/b", "external_weights/x")]
    listed = answered(host, f"training_runs/{FIRST}/checkpoints")["checkpoints"]
    assert [each["tinker_path"] for each in listed] == paths
    page = answered(host, "checkpoints?limit=3&offset=1")
    assert [each["tinker_path"] for each in page["checkpoints"]] == paths[::-1][1:]
    assert page["cursor"] == {"offset": 1, "limit": 3, "total_count": 4}
    assert answered(host, "checkpoints", key=OTHER)["checkpoints"] == []
    assert host.get(f"training_runs/{FIRST}/checkpoints", key=OTHER).status_code == 404
    one = f"training_runs/{FIRST}/checkpoints/weights/a"

    def shown():
        return answered(host, f"training_runs/{FIRST}/checkpoints")["checkpoints"][0]

    def changed(method, path, body=None, key=KEY):
        url = f"{host.url}/api/v1/{one}/{path}"
        return host.client.request(method, url, json=body, headers={"x-api-key": key}).status_code

    assert changed("PUT", "ttl", {"ttl_seconds": 3600}) == 204
    assert (shown()["expires_at"], shown()["public"]) == (time_of(NOW[0] + 3600), False)
    assert host.post("weights_info", {"tinker_path": paths[0]}, key=OTHER).status_code == 404
    assert changed("POST", "publish", {}) == 204
    assert (shown()["expires_at"], shown()["public"]) == (time_of(NOW[0] + 3600), True)
    assert host.post("weights_info", {"tinker_path": paths[0]}, key=OTHER).status_code == 200
    assert changed("PUT", "ttl", {"ttl_seconds": 7200}) == 204
    assert (shown()["expires_at"], shown()["public"]) == (time_of(NOW[0] + 7200), True)
    for method, path, body in (("DELETE", "publish", None), ("PUT", "ttl", {"ttl_seconds": None})):
        assert changed(method, path, body, key=OTHER) == 404  # it is another's, though all may read it
    assert changed("DELETE", "publish") == 204
    assert (shown()["expires_at"], shown()["public"]) == (time_of(NOW[0] + 7200), False)
    assert changed("PUT", "ttl", {"ttl_seconds": None}) == 204
    assert shown()["expires_at"] is None
    assert changed("PUT", "ttl", {"ttl_seconds": True}) == 400


def test_files_are_had_without_a_key_for_an_hour_at_addresses_of_this_server(host):
    path = f"training_runs/{FIRST}/checkpoints/external_weights/x/external_weights_urls"
    told = answered(host, path)
    assert told["expires"] == time_of(NOW[0] + 3600)
    ((name, url),) = told["urls"].items()
    assert name == "deep/a b.bin"
    inner = url.partition("/api/v1/")[2]
    assert inner.startswith("files/")
    NOW[0] += 3599
    assert len(host.get(inner, key=None).content) == 13
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query))
    later = inner.replace(query["expires"], str(int(query["expires"]) + 9))
    assert host.get(later, key=None).status_code == 403
    assert host.get(inner.replace("a%20b.bin", "other"), key=None).status_code == 403
    NOW[0] += 2
    assert host.get(inner, key=None).status_code == 403
    assert host.get(path, key=OTHER).status_code == 404
    assert host.get(path.replace("external_weights/x", "weights/b"), key=KEY).status_code == 400
