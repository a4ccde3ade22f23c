"""The explorer's style sheet, and how it reaches the page before the page's scripts run."""

from typing import Any

from dtem.visualise import html_page, style

SPACE = style.SPACE
LOADING = "Loading the explorer …"
_OVERRIDDEN = {
    "page": ("body-background-fill", "background-fill-primary", "block-background-fill", "input-background-fill"),
    "card": ("background-fill-secondary", "button-secondary-background-fill", "block-label-background-fill"),
    "line": ("border-color-primary", "block-border-color", "input-border-color", "checkbox-label-border-color"),
    "ink": ("body-text-color", "button-secondary-text-color"),
    "muted": ("body-text-color-subdued", "block-label-text-color", "block-info-text-color", "block-title-text-color"),
}
"""Variables of gradio by our colour."""
_GRADIO = " ".join(
    f"--{name}: var(--dtem-{colour}) !important;" for colour, names in _OVERRIDDEN.items() for name in names
)
STYLE = f"""
{style.variables("body.dark { %s }")}
{html_page.PLOT_STYLE}
gradio-app:not(:has(#cards))::before {{ content: "{LOADING}"; display: block; padding: 20vh 24px; text-align: center;
  font: 1.1rem {style.FONT}; }}
gradio-app:not(:has(#cards)) > * {{ visibility: hidden; }}
body, body .gradio-container {{ {_GRADIO} background: var(--dtem-page) !important; }}
.gradio-container {{ max-width: 1280px !important; margin: 0 auto !important; }}
#intro h1 {{ margin: 0 0 {SPACE}px; }}
#sliders {{ gap: {2 * SPACE}px; align-items: stretch; }}
#play {{ min-width: 90px; border: 1px solid var(--dtem-line); }}
#cards, #cards > *, #curve, #curve > *, #examples, #examples > * {{ padding: 0; margin: 0; border: 0; }}
.dtem-cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 235px), 1fr));
  gap: {2 * SPACE}px; }}
.dtem-card {{ border: 1px solid var(--dtem-line); border-top: 4px solid var(--own); border-radius: {style.RADIUS}px;
  padding: {SPACE}px {3 * SPACE // 2}px {3 * SPACE // 2}px; min-width: 0; background: var(--dtem-page);
  color: var(--dtem-ink); }}
#cards .dtem-card h3 {{ margin: 0 0 {SPACE}px; font-size: 1.05rem; display: flex; justify-content: space-between;
  gap: {SPACE}px; color: var(--own); }}
#cards .dtem-card h3 small {{ font-weight: normal; color: var(--dtem-muted); }}
.dtem-card .dtem-picture {{ position: relative; display: grid; }}
.dtem-card .dtem-picture img {{ grid-area: 1 / 1; width: 100%; height: auto; display: block; margin: 0;
  border-radius: 4px; }}
.dtem-card img.square {{ image-rendering: pixelated; }}
.dtem-picture .dtem-frame {{ opacity: 0; transition: opacity 0.2s; }}
dd .dtem-frame {{ display: none; }}
#cards .dtem-facts {{ display: grid; grid-template-columns: 1fr auto; gap: 2px 10px; margin: 10px 0;
  font-size: 0.9rem; }}
#cards .dtem-facts dt {{ color: var(--dtem-muted); }}
#cards .dtem-facts dd {{ margin: 0; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
#cards .dtem-facts .speed-up {{ font-weight: 700; color: var(--own); }}
.dtem-bar {{ position: relative; font-size: 0.85rem; padding: 2px 6px; margin: 2px 0; border-radius: 3px;
  display: flex; justify-content: space-between; gap: {SPACE}px; background: var(--dtem-card); }}
.dtem-bar::before {{ content: ""; position: absolute; inset: 0 auto 0 0; width: var(--part); border-radius: 3px;
  background: var(--own); opacity: 0.25; }}
.dtem-bar span {{ position: relative; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
.dtem-bar span:last-child {{ flex-shrink: 0; }}
.dtem-message {{ border: 1px solid var(--dtem-red); border-left-width: 5px; border-radius: {style.RADIUS}px;
  padding: 12px 14px; color: var(--dtem-ink); }}
.dtem-curve .plot {{ max-width: 44rem; }}
#curve h3 {{ margin: {2 * SPACE}px 0 {SPACE}px; }}
#results .dtem-note {{ color: var(--dtem-muted); font-size: 0.85rem; margin: {SPACE}px 0 0; max-width: 46rem; }}
.dtem-examples {{ display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: {SPACE}px; }}
#examples .dtem-examples p {{ grid-column: 1 / -1; margin: 0; color: var(--dtem-muted); font-size: 0.9rem; }}
#examples .dtem-examples button {{ padding: 0; border: 2px solid var(--dtem-line); border-radius: {style.RADIUS}px;
  overflow: hidden; background: none; cursor: pointer; aspect-ratio: 1; }}
.dtem-examples button:hover, .dtem-examples button:focus-visible {{ border-color: var(--dtem-blue); }}
#examples .dtem-examples img {{ width: 100%; height: 100%; object-fit: cover; display: block; margin: 0; }}
#results {{ position: relative; }}
#results::after {{ content: "Computing …"; position: fixed; right: 24px; bottom: 24px; z-index: 10; padding: 6px 14px;
  border-radius: 999px; background: var(--dtem-ink); color: var(--dtem-page); font-size: 0.9rem; opacity: 0;
  transition: opacity 0.15s; pointer-events: none; }}
body.dtem-busy #results::after {{ opacity: 1; }}
@media (prefers-reduced-motion: reduce) {{ .dtem-picture .dtem-frame {{ transition: none; }} }}
@media (max-width: 640px) {{
  #sliders {{ gap: {SPACE}px; }} #play {{ flex: 1; }} #sliders .form {{ flex-direction: column; }}
  #page {{ flex-direction: column; }} #results {{ order: -1; }} #page > * {{ min-width: 0 !important; width: 100%; }}
  .dtem-cards {{ grid-template-columns: repeat(2, minmax(0, 1fr)); gap: {SPACE}px; }}
  .dtem-card {{ padding: {SPACE}px; }} #cards .dtem-facts, .dtem-bar {{ font-size: 0.75rem; }}
  #cards .dtem-facts {{ gap: 1px 4px; }}
  .dtem-card:first-child {{ grid-column: 1 / -1; display: grid; grid-template-columns: 42% minmax(0, 1fr);
    gap: 0 10px; align-items: start; }}
  .dtem-card:first-child h3 {{ grid-column: 1 / -1; }} .dtem-card:first-child .dtem-picture {{ grid-row: span 2; }}
  #cards .dtem-card:first-child .dtem-facts {{ margin: 0 0 6px; }}
}}
"""


def frames(depth: int) -> str:
    """CSS that shows the frame of the block that the page's body names, or the middle one at first."""
    shown = [f'body[data-block="{block}"] .dtem-frame[data-block="{block}"]' for block in range(1, depth + 1)]
    chosen = ["body:not([data-block]) .dtem-frame.first", *shown]
    pictures = ",\n".join(part.replace(" .dtem-frame", " .dtem-picture .dtem-frame") for part in chosen)
    texts = ",\n".join(part.replace(" .dtem-frame", " dd .dtem-frame") for part in chosen)
    return f"{pictures} {{ opacity: 1; }}\n{texts} {{ display: inline; }}\n"


class StyleSheet:
    """ASGI middleware that puts a style sheet into the head of the page ``/``.

    Gradio adds its own `css` by a script, when the page is ready: too late for a message that it is loading.
    """

    def __init__(self, app: Any, css: str) -> None:
        self.app = app
        self.inserted = f"<style>{css}</style></head>".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = b""

        async def insert(message: Any) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body += message.get("body", b"")
            if message.get("more_body", False):
                return
            changed = body.replace(b"</head>", self.inserted, 1)
            length = (b"content-length", str(len(changed)).encode())
            start["headers"] = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"] + [length]
            await send(start)
            await send({"type": "http.response.body", "body": changed})

        await self.app(scope, receive, insert)
