"""The web page of the explorer. The only module that imports gradio."""

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from dtem.app import page, page_style
from dtem.app.explorer import BATCH_SIZES, METHODS, Explorer, Model
from dtem.app.guard import Guard
from dtem.app.page_style import StyleSheet
from dtem.data import images
from dtem.errors import DtemError, require
from dtem.visualise import style

UPLOAD = "10mb"
"""Largest file that may be uploaded."""
PIXELS = 25_000_000
"""Largest image."""
QUEUE_SIZE = 256
"""Requests that may wait in the queue."""
NUM_SESSIONS = 100
"""Sessions that gradio keeps in memory, the last ones; each takes 0.1 MB."""
NUM_UPLOADS = 64
"""Uploads that are kept while the server runs, the last ones."""
INTRO = """# dtem explorer
Token merging joins patches that are alike, block by block: patches of one token share their mean colour. Drop an image,
choose methods and r, and see what is merged, what the model predicts, and what it costs."""
START_R = 16
START_METHODS = ["tome", "dtem"]
START_BATCH = 8
# In the browser: mark the page while a request runs, show a block's groups, and run through all blocks.
BUSY = "(...values) => { document.body.classList.add('dtem-busy'); return values; }"
DONE = "() => { document.body.classList.remove('dtem-busy'); }"
SHOW_BLOCK = "(block) => { document.body.dataset.block = block; }"
PLAY = """() => {
  const slider = document.querySelector('#block input[type=range]');
  let block = 0;
  const step = () => {
    slider.value = block += 1;
    slider.dispatchEvent(new Event('input', {bubbles: true}));
    if (block >= Number(slider.max)) clearInterval(window.dtemPlay);
  };
  clearInterval(window.dtemPlay);
  window.dtemPlay = setInterval(step, 450);
  step();
}"""
CHOOSE = """element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-index]');
  if (button) trigger('click', {index: Number(button.dataset.index)});
});"""
log = logging.getLogger("dtem.app")


def check() -> None:
    """Raise early if a package that the explorer needs is missing."""
    for package in ("gradio", "matplotlib"):
        require(package, "app")


def no_telemetry() -> None:
    """Switch off telemetry; to be called before gradio is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def render(
    explorer: Explorer,
    upload: str | None,
    example: float | None,
    name: str,
    methods: Sequence[str],
    r: float,
    batch_size: float,
) -> Iterator[tuple[str, str]]:
    """Cards and curve as HTML, first without the latency, which takes longest. An error becomes a message on the page,
    never an error of the server.
    """
    try:
        if name not in explorer.models:
            raise DtemError(f"there is no model {name!r} here; choose from {', '.join(explorer.models)}")
        if upload and not os.path.isfile(upload):
            raise DtemError("this upload is no longer here; drop the image again")
        examples = explorer.models[name].examples
        image = upload if upload else examples[int(example or 0) % len(examples)]
        result = explorer.explore(images.open_image(image, PIXELS), name, methods, r)
        curve = page.curve(result)
        yield page.cards(result), curve
        yield page.cards(explorer.measure(result, batch_size)), curve
    except DtemError as error:
        yield page.message(str(error)), ""
    except Exception as error:
        log.exception("a request failed")
        yield page.message(f"This did not work ({type(error).__name__}); the explorer goes on. Try another image."), ""


def build(models: Sequence[Model]) -> Any:
    """The page with the first example computed, not served yet."""
    no_telemetry()
    check()
    import gradio as gr

    explorer = Explorer(models)
    first = models[0]
    most, depth = explorer.largest(first.name), explorer.depth(first.name)
    start_r = min(START_R, most)
    print("computing the first example …", file=sys.stderr, flush=True)
    for computed in render(explorer, None, 0, first.name, START_METHODS, start_r, START_BATCH):
        start_cards, start_curve = computed
    with gr.Blocks(title="dtem explorer", analytics_enabled=False) as blocks:
        gr.Markdown(INTRO, elem_id="intro")
        with gr.Row(equal_height=False, elem_id="page"):
            with gr.Column(scale=1, min_width=280):
                name = gr.Dropdown(list(explorer.models), value=first.name, label="Model", elem_id="model")
                upload: Any = gr.File(label="Drop an image", file_types=["image"], height=120, elem_id="upload")
                choice = gr.HTML(page.examples(first.examples), js_on_load=CHOOSE, elem_id="examples")
                example = gr.Number(0, visible="hidden", label="example", precision=0)
                labels = [(style.title(method), method) for method in METHODS]
                methods = gr.CheckboxGroup(labels, value=START_METHODS, label="Methods", elem_id="methods")
                sizes = [(str(size), size) for size in BATCH_SIZES]
                batch_size = gr.Radio(sizes, value=START_BATCH, label="Batch size of the latency", elem_id="batch")
            with gr.Column(scale=3, min_width=320, elem_id="results"):
                with gr.Row(elem_id="sliders"):
                    r = gr.Slider(0, most, start_r, step=1, label="r: tokens merged in every block", elem_id="rate")
                    block = gr.Slider(1, depth, (depth + 1) // 2, step=1, label="groups after block", elem_id="block")
                    play = gr.Button("▶ Play", scale=0, elem_id="play")
                cards = gr.HTML(start_cards, elem_id="cards")
                plot = gr.HTML(start_curve, elem_id="curve")

        def explore(
            upload: str | None, example: float | None, name: str, methods: list[str], r: float, batch_size: float
        ) -> Iterator[tuple[str, str]]:
            yield from render(explorer, upload, example, name, methods, r, batch_size)

        def change_model(name: str, r: float) -> tuple[Any, Any, Any]:
            model = explorer.models.get(name, first)
            depth, largest = explorer.depth(model.name), explorer.largest(model.name)
            return (
                page.examples(model.examples),
                gr.Slider(maximum=largest, value=min(r, largest)),
                gr.Slider(maximum=depth, value=(depth + 1) // 2),
            )

        def select(event: gr.EventData) -> tuple[int, None]:
            return int(event.index), None

        gr.on(
            [upload.change, example.change, name.change, methods.change, r.change, batch_size.change],
            explore,
            inputs=[upload, example, name, methods, r, batch_size],
            outputs=[cards, plot],
            js=BUSY,
            show_progress="hidden",
            trigger_mode="always_last",
            api_name="explore",
        ).then(None, js=DONE, api_visibility="private")
        block.change(None, block, js=SHOW_BLOCK, api_visibility="private")
        play.click(None, js=PLAY, api_visibility="private")
        name.change(change_model, [name, r], [choice, r, block], api_visibility="private")
        choice.click(select, None, [example, upload], api_visibility="private")
    # gr.File would leave an empty temporary file behind every request.
    upload.preprocess = lambda payload: None if payload is None else payload.path
    for component in blocks.blocks.values():
        component.async_move_resource_to_block_cache = _without_download(component)
    blocks.queue(max_size=QUEUE_SIZE, default_concurrency_limit=4)
    return blocks


def _without_download(component: Any) -> Any:
    """Gradio downloads a file that a client names by its address; here nothing is fetched from other servers."""
    move = component.async_move_resource_to_block_cache

    async def move_local(path: str | Path | None) -> str | None:
        if path is not None and "://" in str(path):
            import gradio as gr

            raise gr.Error("Give a file, not an address.", print_exception=False)
        return await move(path)

    return move_local


@contextlib.contextmanager
def serve(
    models: Sequence[Model],
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    browser: bool = False,
    allowed_hosts: Collection[str] = (),
) -> Iterator[str]:
    """Serve the page, on this machine alone unless `host` says otherwise; the context is its address.

    Args:
        models: the first one is shown first.
        host: address to listen on.
        port: default: the first free one from 7860 on.
        browser: open the page in the browser.
        allowed_hosts: names by which other machines may address this one; loopback names and `host` always may.
    """
    check_address(host, port)
    with temporary_folder() as folder:
        blocks = build(models)
        depth = max(Explorer(models).depth(model.name) for model in models)
        css = page_style.STYLE + page_style.frames(depth)
        uploads = folder / "uploads"

        def make_room() -> None:
            remove_oldest(uploads, NUM_UPLOADS - 1)
            for names in blocks.temp_file_sets:  # the same files, which gradio would remember forever
                names.clear()

        _launch(blocks, host, port, browser, css, names={host, *allowed_hosts}, before_upload=make_room)
        blocks.app.uploaded_file_dir = str(uploads)
        try:
            yield blocks.local_url
        finally:
            blocks.server.config.timeout_graceful_shutdown = 1  # seconds for open connections
            blocks.close(verbose=False)


def wait() -> None:
    """Wait for a signal."""
    threading.Event().wait()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Folder for all files of gradio, removed at the end."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    folder = tempfile.mkdtemp(prefix="dtem-app-")
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if before is None:
            del os.environ["GRADIO_TEMP_DIR"]
        else:
            os.environ["GRADIO_TEMP_DIR"] = before


def remove_oldest(folder: Path, limit: int) -> None:
    """Remove all files of a folder but the `limit` newest ones, and folders that are then empty."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another upload has moved it just now
            if path.is_file():
                files.append((path.stat().st_mtime, path))
    for _, path in sorted(files)[: max(0, len(files) - limit)]:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


def _launch(blocks: Any, host: str, port: int | None, browser: bool, css: str, **guard: Any) -> None:
    import gradio as gr
    from starlette.middleware import Middleware

    theme = gr.themes.Default(
        primary_hue="blue",
        neutral_hue="gray",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    try:
        blocks.launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
            prevent_thread_lock=True,
            share=False,
            max_file_size=UPLOAD,
            state_session_capacity=NUM_SESSIONS,
            footer_links=[],
            ssr_mode=False,
            enable_monitoring=False,
            quiet=True,
            theme=theme,
            app_kwargs={"middleware": [Middleware(Guard, **guard), Middleware(StyleSheet, css=css)]},
        )
    except OSError as error:
        raise DtemError(f"cannot serve on {host}, port {port or 'any'}: {error}") from error


def check_address(host: str, port: int | None) -> None:
    """Refuse an address on which nothing could listen; gradio would try one port after the other."""
    if port is not None and not 0 < port < 65536:
        raise DtemError(f"port = {port} must be a number from 1 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise DtemError(
            f"host = {host!r}: this machine cannot listen there ({error}); use 127.0.0.1 or 0.0.0.0"
        ) from error
