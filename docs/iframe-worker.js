// A browser starts no worker for a page that was opened from a folder, so there the search works in a frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postToPage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inner.document.createElement("script");
      script.textContent = "self.postMessage = postToPage";
      this.inner.document.body.append(script);
      this.loaded = new Promise((resolve) => {
        const worker = this.inner.document.createElement("script");
        Object.assign(worker, { src: url, onload: resolve });
        this.inner.document.body.append(worker);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
