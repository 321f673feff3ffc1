"""Open a page in headless Chromium and print its contents as JSON.

The interpreter needs playwright.

    python look.py PAGE CHROMIUM [AXE]

PAGE is an HTML file, CHROMIUM is the browser's program, and AXE is the file ``axe.min.js`` of axe-core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

PLOTS = """() => [...document.querySelectorAll('svg[role=img]')].map(plot => {
  const box = plot.getBoundingClientRect(), shapes = [...plot.querySelectorAll('rect, path, circle')];
  const drawn = shapes.filter(s => { const b = s.getBoundingClientRect(); return b.width + b.height > 0; });
  return {id: plot.id, width: box.width, height: box.height, shapes: drawn.length};
})"""
FOCUS = """() => {
  const e = document.activeElement;
  return e === document.body ? null : e.tagName + '|' + (e.ariaLabel || e.textContent).trim();
}"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPENED = "() => document.activeElement.parentElement.open"


def look(browser: Browser, page_path: Path, axe: Path | None, scheme: str, width: int) -> dict[str, object]:
    """Return the contents of one view of the page."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_path.resolve().as_uri())
    result: dict[str, object] = {"plots": page.evaluate(PLOTS), "overflow": page.evaluate(OVERFLOW), "title": page.title()}
    reached, opened = [], None
    for _ in range(200):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if focus is None:
            break
        reached.append(focus)
        if focus.startswith("SUMMARY") and opened is None:
            page.keyboard.press("Enter")
            opened = page.evaluate(OPENED)
    result |= {"reached": reached, "opened": opened, "messages": messages, "requests": requests}
    if axe is not None:
        page.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = true })")
        page.add_script_tag(path=str(axe))
        found = page.evaluate(
            "async () => (await axe.run()).violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))])"
        )
        result["violations"] = found
    page.close()
    return result


def main() -> None:
    """Print the contents of a page in light and dark colours, and in a wide and a narrow window."""
    path, program, *rest = sys.argv[1:]
    axe = Path(rest[0]) if rest else None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        views = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 390)}
        print(json.dumps({name: look(browser, Path(path), axe, *view) for name, view in views.items()}))
        browser.close()


if __name__ == "__main__":
    main()
