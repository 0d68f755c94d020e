//! HTTP requests of tests.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Deadline of each read: a server that does not respond fails the test instead of blocking it.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The response to an HTTP/1.0 request for `path`: status line, header and body. `None` if the server closes the
/// connection without a response, or if an error occurs.
pub fn http_get(address: impl ToSocketAddrs, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: test\r\n\r\n").as_bytes()).ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    (!response.is_empty()).then_some(response)
}
