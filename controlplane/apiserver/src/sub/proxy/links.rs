//! Rewrites links in redirects and HTML pages of a proxied server, so that they point to the proxy.
//!
//! Source: `apimachinery/pkg/util/proxy/transport.go`.

use std::{
    io::{self, Write as _},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body::Frame;
use http_body_util::BodyExt as _;
use lol_html::{
    MemorySettings, element,
    html_content::Element,
    send::{HtmlRewriter, SendHandlerTypes, Settings},
};

use crate::reply::{Body, Reply};

/// Attributes with links, by element.
const LINKS: &[(&str, &[&str])] = &[
    ("a", &["href"]),
    ("applet", &["codebase"]),
    ("area", &["href"]),
    ("audio", &["src"]),
    ("base", &["href"]),
    ("blockquote", &["cite"]),
    ("body", &["background"]),
    ("button", &["formaction"]),
    ("command", &["icon"]),
    ("del", &["cite"]),
    ("embed", &["src"]),
    ("form", &["action"]),
    ("frame", &["longdesc", "src"]),
    ("head", &["profile"]),
    ("html", &["manifest"]),
    ("iframe", &["longdesc", "src"]),
    ("img", &["longdesc", "src", "usemap"]),
    ("input", &["src", "usemap", "formaction"]),
    ("ins", &["cite"]),
    ("link", &["href"]),
    ("object", &["classid", "codebase", "data", "usemap"]),
    ("q", &["cite"]),
    ("script", &["src"]),
    ("source", &["src"]),
    ("video", &["poster", "src"]),
];

/// Maximum bytes that the rewriter buffers of one page, and so the maximum size of a tag.
const MAX_TAG: usize = 1 << 20;
/// Bytes of a compressed page that are decompressed in one step. The result is at most about a thousand times larger.
const COMPRESSED_PIECE: usize = 128;
/// Bytes of a page that are rewritten in one step. Short links may grow to forty times their size, and the output stays
/// in memory until the client reads it.
const PLAIN_PIECE: usize = 8 << 10;

/// Rules of the rewriting: links to one of `hosts` get the prefix `base`.
#[derive(Clone)]
pub(super) struct Links {
    /// Path of the proxy, without a slash at the end.
    pub(super) base: String,
    /// Hosts and ports by which the page may name its own server: the host in the client's request, and the
    /// address of the server.
    pub(super) hosts: Vec<String>,
}

/// Bytes that the rewriter has written and the client has not received yet.
type Output = Arc<Mutex<Vec<u8>>>;
type Sink = Box<dyn FnMut(&[u8]) + Send>;

/// A page whose links are rewritten while it is sent to the client.
struct Page {
    source: Body,
    /// Source bytes that are not decompressed yet.
    input: Bytes,
    /// Decompressed bytes that are not rewritten yet.
    plain: Bytes,
    /// Whether the source has no more bytes.
    is_read: bool,
    coding: Coding,
    /// The rewriter of the links. `None` at the end of the page.
    rewriter: Option<HtmlRewriter<'static, Sink>>,
    output: Output,
}

/// The compression of a page.
enum Coding {
    Identity,
    Gzip(MultiGzDecoder<Vec<u8>>),
    Deflate(ZlibDecoder<Vec<u8>>),
}

// === impl Links ===

impl Links {
    /// Changes a redirect, or else the links of a page.
    pub(super) fn rewrite(self, mut reply: Reply) -> Reply {
        if let Some(place) = reply.headers().get(header::LOCATION) {
            let rewritten = place.to_str().ok().and_then(|place| self.rewritten(place));
            if let Some(Ok(rewritten)) = rewritten.map(|place| HeaderValue::from_str(&place)) {
                reply.headers_mut().insert(header::LOCATION, rewritten);
            }
            return reply;
        }
        let has_page =
            !matches!(reply.status(), StatusCode::SWITCHING_PROTOCOLS | StatusCode::PARTIAL_CONTENT)
                && is_html(reply.headers());
        let Some(coding) = has_page.then(|| Coding::of(reply.headers())).flatten() else { return reply };
        reply.headers_mut().remove(header::CONTENT_LENGTH);
        reply.headers_mut().remove(header::CONTENT_ENCODING);
        reply.map(|body| Page::new(self, coding, body).boxed_unsync())
    }

    /// The link that points to the proxy. `None` if the link is relative, points to another server, or points to the
    /// proxy already.
    fn rewritten(&self, link: &str) -> Option<String> {
        let path = match link.split_once("://") {
            Some(("http" | "https", rest)) => {
                let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
                self.hosts.iter().any(|own| own == host).then(|| &rest[host.len()..])?
            }
            _ if link.starts_with('/') && !link.starts_with("//") => link,
            _ => return None,
        };
        let is_below =
            path.strip_prefix(&self.base).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if is_below {
            return None;
        }
        let slash = if path.starts_with('/') { "" } else { "/" };
        Some(format!("{}{slash}{path}", self.base))
    }

    fn rewrite_element(&self, element: &mut Element<'_, '_, SendHandlerTypes>) {
        let name = element.tag_name();
        let Some((_, attributes)) = LINKS.iter().find(|(with, _)| *with == name) else { return };
        for attribute in *attributes {
            let rewritten = element.get_attribute(attribute).and_then(|link| self.rewritten(link.trim()));
            if let Some(rewritten) = rewritten {
                // Fails only for invalid attribute names; these are valid.
                let _ = element.set_attribute(attribute, &rewritten);
            }
        }
    }
}

fn is_html(headers: &HeaderMap) -> bool {
    let media = headers.get(header::CONTENT_TYPE).and_then(|media| media.to_str().ok()).unwrap_or_default();
    media.split(';').next().is_some_and(|media| media.trim().eq_ignore_ascii_case("text/html"))
}

// === impl Coding ===

impl Coding {
    /// The compression of a response; `None` if the compression is not supported.
    fn of(headers: &HeaderMap) -> Option<Self> {
        match headers.get(header::CONTENT_ENCODING).map(HeaderValue::as_bytes) {
            None | Some(b"" | b"identity") => Some(Self::Identity),
            Some(b"gzip" | b"x-gzip") => Some(Self::Gzip(MultiGzDecoder::new(Vec::new()))),
            Some(b"deflate") => Some(Self::Deflate(ZlibDecoder::new(Vec::new()))),
            Some(_) => None,
        }
    }

    /// Removes the next piece from the input and decompresses it.
    fn next(&mut self, input: &mut Bytes) -> io::Result<Bytes> {
        if matches!(self, Self::Identity) {
            return Ok(std::mem::take(input));
        }
        let piece = input.split_to(input.len().min(COMPRESSED_PIECE));
        let plain = match self {
            Self::Identity => return Ok(piece),
            Self::Gzip(decoder) => {
                decoder.write_all(&piece)?;
                decoder.get_mut()
            }
            Self::Deflate(decoder) => {
                decoder.write_all(&piece)?;
                decoder.get_mut()
            }
        };
        Ok(std::mem::take(plain).into())
    }

    /// The remaining decompressed bytes at the end of the input.
    fn rest(&mut self) -> io::Result<Bytes> {
        let plain = match self {
            Self::Identity => return Ok(Bytes::new()),
            Self::Gzip(decoder) => {
                decoder.try_finish()?;
                decoder.get_mut()
            }
            Self::Deflate(decoder) => {
                decoder.try_finish()?;
                decoder.get_mut()
            }
        };
        Ok(std::mem::take(plain).into())
    }
}

// === impl Page ===

impl Page {
    fn new(links: Links, coding: Coding, source: Body) -> Self {
        let output = Output::default();
        let sink = output.clone();
        let sink = move |bytes: &[u8]| {
            sink.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        };
        let mut settings = Settings::new_send();
        settings.element_content_handlers.push(element!("*", move |element| {
            links.rewrite_element(element);
            Ok(())
        }));
        settings.memory_settings =
            MemorySettings { max_allowed_memory_usage: MAX_TAG, ..MemorySettings::default() };
        settings.strict = false;
        let rewriter = HtmlRewriter::new(settings, Box::new(sink) as Sink);
        let (input, plain) = (Bytes::new(), Bytes::new());
        Self { source, input, plain, is_read: false, coding, rewriter: Some(rewriter), output }
    }

    /// Rewrites the next piece of the decompressed bytes.
    fn write(&mut self) -> io::Result<()> {
        let piece = self.plain.split_to(self.plain.len().min(PLAIN_PIECE));
        let Some(rewriter) = &mut self.rewriter else { return Ok(()) };
        rewriter.write(&piece).map_err(io::Error::other)
    }

    fn end(&mut self) -> io::Result<()> {
        self.rewriter.take().map_or(Ok(()), |rewriter| rewriter.end().map_err(io::Error::other))
    }

    fn written(&self) -> Vec<u8> {
        std::mem::take(&mut *self.output.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl http_body::Body for Page {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            let written = self.written();
            if !written.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(written.into()))));
            }
            if self.rewriter.is_none() {
                return Poll::Ready(None);
            }
            let step = if !self.plain.is_empty() {
                self.write()
            } else if self.is_read {
                self.end()
            } else if self.input.is_empty() {
                match ready!(Pin::new(&mut self.source).poll_frame(context)) {
                    Some(Ok(frame)) => {
                        // Trailers are dropped: they may describe the page before the changes, such as a digest.
                        self.input = frame.into_data().unwrap_or_default();
                        Ok(())
                    }
                    Some(Err(error)) => Err(error),
                    None => {
                        let this = &mut *self;
                        this.is_read = true;
                        this.coding.rest().map(|rest| this.plain = rest)
                    }
                }
            } else {
                let this = &mut *self;
                this.coding.next(&mut this.input).map(|plain| this.plain = plain)
            };
            if let Err(error) = step {
                self.rewriter = None;
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}

/// Fuzz target: a byte that selects the compression, and a page of a proxied server.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    use futures::FutureExt as _;
    // A short page may be decompressed to a long page.
    const MOST: usize = 1 << 20;
    let Some((coding, page)) = data.split_first() else { return };
    let coding = match coding % 3 {
        0 => Coding::Identity,
        1 => Coding::Gzip(MultiGzDecoder::new(Vec::new())),
        _ => Coding::Deflate(ZlibDecoder::new(Vec::new())),
    };
    let links = Links { base: "/proxy".to_owned(), hosts: vec!["web:80".to_owned()] };
    let source = http_body_util::Full::new(Bytes::copy_from_slice(page)).map_err(|never| match never {});
    let mut page = Page::new(links, coding, source.boxed_unsync());
    let mut sent = 0;
    while let Some(Some(Ok(frame))) = page.frame().now_or_never() {
        sent += frame.into_data().map_or(0, |piece| piece.len());
        if sent > MOST {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compression, write::GzEncoder};

    use super::*;
    use crate::reply;

    fn links() -> Links {
        Links { base: "/base".to_owned(), hosts: vec!["10.0.0.1:8080".to_owned()] }
    }

    fn page(media: &'static str, text: impl Into<Bytes>) -> Reply {
        reply::bytes(200, media, text)
    }

    async fn text(reply: Reply) -> io::Result<String> {
        let body = reply.into_body().collect().await?.to_bytes();
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    #[test]
    fn links_to_the_server_itself_lead_through_the_proxy() {
        for (link, expect) in [
            ("/a", Some("/base/a")),
            ("/", Some("/base/")),
            ("/a?b#c", Some("/base/a?b#c")),
            ("/basement", Some("/base/basement")),
            ("/base", None),
            ("/base/a", None),
            ("http://10.0.0.1:8080/a", Some("/base/a")),
            ("https://10.0.0.1:8080?a", Some("/base/?a")),
            ("https://10.0.0.1/a", None),
            ("//evil/a", None),
            ("a", None),
            ("#a", None),
            ("mailto:a@b", None),
            ("", None),
        ] {
            assert_eq!(links().rewritten(link).as_deref(), expect, "{link}");
        }
    }

    #[test]
    fn redirects_stay_below_the_proxy() {
        for (place, expect) in [("/a", "/base/a"), ("//evil/a", "//evil/a"), ("https://x/", "https://x/")] {
            let mut reply = page("text/html", "");
            reply.headers_mut().insert(header::LOCATION, HeaderValue::from_static(place));
            assert_eq!(links().rewrite(reply).headers()[header::LOCATION], expect);
        }
    }

    #[tokio::test]
    async fn links_of_pages_change_and_nothing_else() {
        let before = "<A HREF='/x'>/x</A><img src=/i.png alt=\"/i\"><p title=\"/t\"><a href=\"y\"><!-- <a href=\"/\"> -->";
        let after = "<A HREF=\"/base/x\">/x</A><img src=\"/base/i.png\" alt=\"/i\"><p title=\"/t\"><a href=\"y\"><!-- <a href=\"/\"> -->";
        let mut whole = page("text/html; charset=utf-8", before);
        whole.headers_mut().insert(header::CONTENT_LENGTH, before.len().into());
        let whole = links().rewrite(whole);
        assert!(!whole.headers().contains_key(header::CONTENT_LENGTH));
        assert_eq!(text(whole).await.unwrap().to_lowercase(), after.to_lowercase());
        assert_eq!(text(links().rewrite(page("text/plain", before))).await.unwrap(), before);
    }

    #[tokio::test]
    async fn a_compressed_page_is_sent_without_compression() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        let long = "<a href=\"/x\"></a>".repeat(10_000);
        encoder.write_all(long.as_bytes()).unwrap();
        let mut reply = page("text/html", encoder.finish().unwrap());
        reply.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let reply = links().rewrite(reply);
        assert!(!reply.headers().contains_key(header::CONTENT_ENCODING));
        assert_eq!(text(reply).await.unwrap(), long.replace("/x", "/base/x"));

        let mut broken = page("text/html", "not gzip");
        broken.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        assert!(text(links().rewrite(broken)).await.is_err());
    }

    #[tokio::test]
    async fn a_page_of_short_links_grows_in_small_pieces() {
        let links = || Links { base: format!("/{}", "b".repeat(360)), hosts: Vec::new() };
        // Void elements, because the rewriter keeps other elements in memory while they are open.
        let plain = "<img src=/>".repeat(100_000);
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(plain.as_bytes()).unwrap();
        let mut compressed = page("text/html", encoder.finish().unwrap());
        compressed.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        for reply in [page("text/html", plain), compressed] {
            let (mut body, mut total) = (links().rewrite(reply).into_body(), 0);
            while let Some(frame) = body.frame().await {
                let piece = frame.unwrap().into_data().unwrap();
                assert!(piece.len() < 1 << 20, "{} bytes wait in memory", piece.len());
                total += piece.len();
            }
            assert!(total > 36_000_000, "{total}");
        }
    }

    #[tokio::test]
    async fn a_tag_without_end_is_an_error_and_not_kept_in_memory() {
        let endless = format!("<a href=\"{}", "x".repeat(2 * MAX_TAG));
        assert!(text(links().rewrite(page("text/html", endless))).await.is_err());
    }
}
