"""A local server of OpenEnv, on a free port, whose environment counts to three."""

import contextlib
import socket
import threading
import time


@contextlib.contextmanager
def serving():
    """The address of a server, for as long as the context lasts."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        text: str = ""

    class Seen(Observation):
        text: str = ""

    class Three(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.said = []

        def reset(self, seed=None, episode_id=None, **others):
            self.said = []
            return Seen(text="ready", done=False, reward=0.0)

        def step(self, action, **others):
            self.said.append(action.text)
            return Seen(text=" ".join(self.said), done=len(self.said) == 3, reward=len(self.said) / 10)

        @property
        def state(self):
            return State(episode_id="x", step_count=len(self.said))

    app = create_fastapi_app(Three, Said, Seen, max_concurrent_envs=8)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
