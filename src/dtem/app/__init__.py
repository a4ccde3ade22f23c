"""The explorer (`dtem app`): groups, predictions and costs of an image, side by side in a browser.

`explorer` computes, `page` writes HTML, `examples` draws pictures; only `server` knows of gradio.
"""
