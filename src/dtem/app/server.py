"""The explorer's web page. The only module that knows of gradio."""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from dtem.app import page
from dtem.app.explorer import METHODS, Explorer, Model
from dtem.tasks.classification import pictures
from dtem.types import DtemError

UPLOAD = "10mb"
"""Largest file that may be uploaded."""
PIXELS = 25_000_000
"""Largest image."""
WAITING = 256
"""Requests that may wait their turn."""
INTRO = """# dtem explorer
Token merging joins patches that are alike, block by block: patches of one token share their mean colour. Drop an image,
choose methods and r, and see what is merged, what the model says, and what it costs."""
# Everything comes from this server: a page that asks for anything else is stopped by the browser.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; form-action 'self'"
log = logging.getLogger("dtem.app")


def check() -> None:
    """Refuse early where gradio is missing."""
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise DtemError("the explorer needs gradio, which is not installed: pip install 'dtem[app]'") from error


def quiet() -> None:
    """Before gradio is imported: nothing calls home."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def answer(
    explorer: Explorer,
    upload: str | None,
    example: float | None,
    name: str,
    methods: Sequence[str],
    r: float,
    block: float,
) -> tuple[str, str]:
    """Cards and curve; whatever goes wrong becomes a message, never an error of the server."""
    try:
        if name not in explorer.models:
            raise DtemError(f"there is no model {name!r} here; choose from {', '.join(explorer.models)}")
        known = explorer.models[name].examples
        image = upload if upload else known[int(example or 0) % len(known)]
        opened = pictures.open_image(image, PIXELS)
        result = explorer.explore(opened, name, methods, r)
        at = page.checked(block, explorer.depth(name))
        return page.cards(result, at), page.curve(result)
    except DtemError as error:
        return page.message(str(error)), ""
    except Exception as error:
        log.exception("a request failed")
        return page.message(f"This did not work ({type(error).__name__}); the explorer goes on. Try another image."), ""


def build(models: Sequence[Model]) -> Any:
    """The page, not served yet."""
    quiet()
    check()
    import gradio as gr

    explorer = Explorer(models)
    first = models[0]
    with gr.Blocks(title="dtem explorer", analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        gr.Markdown(INTRO)
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=300):
                name = gr.Dropdown(list(explorer.models), value=first.name, label="Model", elem_id="model")
                upload = gr.File(label="Drop an image", file_types=["image"], height=120, elem_id="upload")
                gallery = gr.Gallery(
                    [*first.examples],
                    label="or take an example",
                    columns=3,
                    height="auto",
                    object_fit="contain",
                    allow_preview=False,
                    interactive=False,
                    buttons=[],
                    format="png",
                    elem_id="examples",
                )
                example = gr.Number(0, visible="hidden", label="example", precision=0)
                methods = gr.CheckboxGroup(list(METHODS), value=["tome", "dtem"], label="Methods", elem_id="methods")
                most = explorer.largest(first.name)
                r = gr.Slider(0, most, min(16, most), step=1, label="r: tokens merged in every block", elem_id="rate")
                depth = explorer.depth(first.name)
                block = gr.Slider(1, depth, (depth + 1) // 2, step=1, label="groups after block", elem_id="block")
            with gr.Column(scale=3, min_width=320):
                cards = gr.HTML(elem_id="cards")
                gr.Markdown("### What it costs, and what is left")
                plot = gr.HTML(elem_id="curve")

        def explore(
            upload: str | None, example: float | None, name: str, methods: list[str], r: float, block: float
        ) -> tuple[str, str]:
            return answer(explorer, upload, example, name, methods, r, block)

        def choose(name: str, r: float) -> tuple[Any, Any, Any]:
            known = explorer.models.get(name, first)
            deep, most = explorer.depth(known.name), explorer.largest(known.name)
            return (
                gr.Gallery([*known.examples]),
                gr.Slider(maximum=most, value=min(r, most)),
                gr.Slider(maximum=deep, value=(deep + 1) // 2),
            )

        def take(event: gr.SelectData) -> tuple[int, None]:
            return int(event.index), None

        given = [upload, example, name, methods, r, block]
        asked = {"inputs": given, "outputs": [cards, plot], "show_progress": "minimal"}
        gr.on(
            [blocks.load, upload.change, example.change, name.change, methods.change, r.change, block.change],
            explore,
            **asked,
            trigger_mode="always_last",
            api_name="explore",
        )
        name.change(choose, [name, r], [gallery, r, block], api_visibility="private")
        gallery.select(take, None, [example, upload], api_visibility="private")
    blocks.queue(max_size=WAITING, default_concurrency_limit=4)
    return blocks


def launch(
    models: Sequence[Model],
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    browser: bool = False,
    wait: bool = True,
) -> Any:
    """Serve the page, on this machine alone unless `host` says otherwise. Without `wait`, returns the running page."""
    check_address(host, port)
    blocks = build(models)
    import gradio as gr
    from starlette.middleware import Middleware

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    try:
        blocks.launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
            prevent_thread_lock=True,
            share=False,
            max_file_size=UPLOAD,
            footer_links=[],
            ssr_mode=False,
            enable_monitoring=False,
            quiet=True,
            theme=theme,
            css=page.STYLE,
            app_kwargs={"middleware": [Middleware(OwnPagesOnly)]},
        )
    except OSError as error:
        raise DtemError(f"cannot serve on {host}, port {port or 'any'}: {error}") from error
    if wait:
        blocks.block_thread()
    return blocks


def check_address(host: str, port: int | None) -> None:
    """Refuse an address on which nothing could listen; gradio would try one port after the other."""
    if port is not None and not 0 < port < 65536:
        raise DtemError(f"--port {port} must be a number from 1 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise DtemError(
            f"--host {host}: this machine cannot listen there ({error}); use 127.0.0.1 or 0.0.0.0"
        ) from error


class OwnPagesOnly:
    """Tells the browser to take nothing from other servers."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)
