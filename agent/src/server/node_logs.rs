//! `/logs/`: the files below `/var/log`, for readers with the permission `nodes/log`, as in the kubelet.
//!
//! Pods may write there through a volume of the node. So no link leads out of the directory, and only regular files and
//! directories are opened.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::libc::{ELOOP, EXDEV, O_NONBLOCK};
use nix::sys::stat::Mode;
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use tokio::io::AsyncReadExt as _;
use tokio_util::io::ReaderStream;

use super::respond::{text, typed};
use crate::runtime::Body;

/// The directory of the node's logs.
const ROOT: &str = "/var/log";
/// Maximum entries of a listing. Further entries are left out.
const ENTRIES_MAX: usize = 5000;
/// Maximum bytes of one read.
const CHUNK: usize = 16 << 10;

/// An opened path.
enum Found {
    /// A directory, as a page with links.
    Listing(String),
    /// A redirect to the path with, or without, a slash at its end. The value is a Location relative to the request's
    /// path.
    Elsewhere(String),
    /// A regular file with its size.
    File(File, u64),
}

/// The file or directory at a path below `/var/log`. `is_directory` is true if the request's path ends with a slash.
pub(super) async fn answer(path: String, is_directory: bool) -> Response<Body> {
    answer_below(PathBuf::from(ROOT), path, is_directory).await
}

async fn answer_below(root: PathBuf, path: String, is_directory: bool) -> Response<Body> {
    let found = coracle_threads::spawn_blocking(move || find(&root, &path, is_directory)).await;
    match found.unwrap_or_else(|error| Err(io::Error::other(error))) {
        Ok(Found::Listing(page)) => typed(StatusCode::OK, "text/html; charset=utf-8", page.into()),
        Ok(Found::Elsewhere(location)) => redirect(&location),
        Ok(Found::File(file, size)) => stream(file, size),
        Err(error) => refusal(&error),
    }
}

fn find(root: &Path, path: &str, is_directory: bool) -> io::Result<Found> {
    let root = nix::fcntl::open(root, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let inside = if path.is_empty() { "." } else { path };
    let found = coracle_tree::open_despite_renames(|| openat2(&root, inside, how))?;
    // The O_PATH descriptor cannot be read. Its link in /proc leads to the same file, even if the path has been
    // changed.
    let link = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    let metadata = std::fs::metadata(&link)?;
    if metadata.is_dir() {
        // The links of a listing are relative to a path with a slash at its end.
        return if is_directory {
            listing(&link).map(Found::Listing)
        } else {
            Ok(Found::Elsewhere(format!("{}/", last_part(path))))
        };
    }
    // Opening a device or a pipe may have side effects.
    if !metadata.is_file() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    if is_directory {
        return Ok(Found::Elsewhere(format!("../{}", last_part(path))));
    }
    // Without O_NONBLOCK the open waits while the owner of the file holds a lease on it (fcntl(2)).
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&link)?;
    Ok(Found::File(file, metadata.len()))
}

/// The last part of a path in the form of a URL. For the root directory it is `logs`.
fn last_part(path: &str) -> String {
    let name = path.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("logs");
    percent_encode(name.as_bytes(), NON_ALPHANUMERIC).to_string()
}

fn listing(directory: &Path) -> io::Result<String> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    for entry in std::fs::read_dir(directory)?.take(ENTRIES_MAX) {
        let entry = entry?;
        let mut name = entry.file_name().as_bytes().to_vec();
        if entry.file_type()?.is_dir() {
            name.push(b'/');
        }
        names.push(name);
    }
    names.sort_unstable();
    let mut page = "<!doctype html>\n<pre>\n".to_owned();
    for name in names {
        let (bare, slash) = name.strip_suffix(b"/").map_or((&name[..], ""), |bare| (bare, "/"));
        let (link, shown) = (percent_encode(bare, NON_ALPHANUMERIC), escaped(&String::from_utf8_lossy(bare)));
        let _never_fails = writeln!(page, "<a href=\"{link}{slash}\">{shown}{slash}</a>");
    }
    page.push_str("</pre>\n");
    Ok(page)
}

/// Text of an HTML page.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;")
}

/// The file up to the size that it had when it was opened.
fn stream(file: File, size: u64) -> Response<Body> {
    let file = tokio::fs::File::from_std(file).take(size);
    let chunks = ReaderStream::with_capacity(file, CHUNK);
    // The connection is closed if the file ends before the announced length.
    let chunks = chunks.take_while(|chunk| std::future::ready(chunk.is_ok()));
    let frames = chunks.filter_map(|chunk| std::future::ready(chunk.ok()));
    let frames = frames.map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_LENGTH, size.into());
    response
}

/// A permanent redirect, as by Go's `http.FileServer`.
fn redirect(location: &str) -> Response<Body> {
    let mut response = text(StatusCode::MOVED_PERMANENTLY, "");
    if let Ok(location) = HeaderValue::from_str(location) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

fn refusal(error: &io::Error) -> Response<Body> {
    let leads_out = matches!(error.raw_os_error(), Some(EXDEV | ELOOP));
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => text(StatusCode::NOT_FOUND, "404 page not found\n"),
        _ if leads_out => text(StatusCode::FORBIDDEN, "403 Forbidden\n"),
        ErrorKind::PermissionDenied => text(StatusCode::FORBIDDEN, "403 Forbidden\n"),
        _ => text(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error\n"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    async fn get(root: &Path, path: &str) -> (u16, String) {
        let is_directory = path.is_empty() || path.ends_with('/');
        let path = path.trim_end_matches('/').to_owned();
        let response = answer_below(root.to_owned(), path, is_directory).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn files_and_listings_are_served() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pods")).unwrap();
        std::fs::write(dir.path().join("pods/a.log"), "line\n").unwrap();
        std::fs::write(dir.path().join("<b>"), vec![b'x'; 3 * CHUNK]).unwrap();
        symlink("pods/a.log", dir.path().join("link")).unwrap();
        let (status, page) = get(dir.path(), "").await;
        assert_eq!(status, 200);
        let links =
            "<a href=\"%3Cb%3E\">&lt;b&gt;</a>\n<a href=\"link\">link</a>\n<a href=\"pods/\">pods/</a>\n";
        assert!(page.contains(links), "{page}");
        for path in ["pods/a.log", "link", "pods/../link"] {
            assert_eq!(get(dir.path(), path).await, (200, "line\n".to_owned()), "{path}");
        }
        assert_eq!(get(dir.path(), "<b>").await.1.len(), 3 * CHUNK);
        assert_eq!(get(dir.path(), "none").await.0, 404);
        assert_eq!(get(dir.path(), "link/x").await.0, 404);
    }

    #[test]
    fn a_log_is_opened_while_other_files_are_renamed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("inner")).unwrap();
        std::fs::write(dir.path().join("inner/file"), "x").unwrap();
        symlink("../inner/".repeat(10).trim_end_matches('/'), dir.path().join("inner/in")).unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, "x").unwrap();
        std::thread::scope(|scope| {
            let renaming = scope.spawn(|| {
                for _ in 0..50_000 {
                    std::fs::rename(&a, &b).and_then(|()| std::fs::rename(&b, &a)).unwrap();
                }
            });
            while !renaming.is_finished() {
                assert!(find(dir.path(), "inner/in/file", false).is_ok());
            }
        });
    }

    #[tokio::test]
    async fn a_path_is_corrected_by_a_redirect() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b:c")).unwrap();
        std::fs::write(dir.path().join("a/file"), "").unwrap();
        for (path, is_directory, location) in
            [("a/b:c", false, "b%3Ac/"), ("", false, "logs/"), ("a/file", true, "../file")]
        {
            let response = answer_below(dir.path().to_owned(), path.to_owned(), is_directory).await;
            assert_eq!(response.status(), StatusCode::MOVED_PERMANENTLY, "{path}");
            assert_eq!(response.headers()[header::LOCATION], location, "{path}");
        }
    }

    #[tokio::test]
    async fn a_listing_has_a_limited_number_of_entries() {
        let dir = tempfile::tempdir().unwrap();
        (0..=ENTRIES_MAX).for_each(|number| std::fs::write(dir.path().join(number.to_string()), "").unwrap());
        let (status, page) = get(dir.path(), "").await;
        assert_eq!((status, page.matches("<a ").count()), (200, ENTRIES_MAX));
    }

    #[tokio::test]
    async fn nothing_outside_of_the_directory_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let (root, secret) = (dir.path().join("log"), dir.path().join("secret"));
        std::fs::create_dir(&root).unwrap();
        std::fs::write(&secret, "secret").unwrap();
        symlink(&secret, root.join("absolute")).unwrap();
        symlink("../secret", root.join("relative")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        nix::unistd::mkfifo(&root.join("pipe"), Mode::S_IRUSR).unwrap();
        for path in ["absolute", "relative", "magic", "../secret", "/etc/passwd", "pipe"] {
            let (status, body) = get(&root, path).await;
            assert!(status >= 400 && !body.contains("secret"), "{path}: {status} {body}");
        }
    }
}
