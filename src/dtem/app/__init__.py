"""The explorer (`dtem app`): groups, predictions and costs of an image, side by side in a browser.

`explorer` computes, `page` writes HTML, `examples` has pictures; only `server` imports gradio.
"""
