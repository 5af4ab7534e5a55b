// Search in a site that is opened from a folder: there a browser refuses to start the worker that searches, so its
// script runs in a hidden frame. mkdocs-material's search looks whether its parent has `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise((started) => {
        frame.onload = () => {
          frame.onload = null;
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const element = inside.document.createElement("script");
          element.src = new URL(script, location.href).href;
          element.onload = () => started(inside);
          inside.document.head.append(element);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      (await this.inside).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
