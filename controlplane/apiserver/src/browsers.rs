//! Settings that only browsers need: the origins whose pages may read responses (CORS), and
//! `Strict-Transport-Security`.
//!
//! Source: `WithCORS` of `k8s.io/apiserver`.

use http::{HeaderMap, HeaderValue, header};
use regex::Regex;

/// The settings for browsers.
#[derive(Debug)]
pub(crate) struct Browsers {
    /// The header `Strict-Transport-Security` of responses to the network.
    pub(crate) transport_security: Option<HeaderValue>,
    pub(crate) origins: AllowedOrigins,
}

/// Regular expressions of the origins whose pages may read responses.
#[derive(Debug)]
pub(crate) struct AllowedOrigins(Vec<Regex>);

// === impl AllowedOrigins ===

impl AllowedOrigins {
    /// Compiles the expressions.
    ///
    /// # Errors
    /// An expression is invalid.
    pub(crate) fn new(expressions: &[String]) -> Result<Self, regex::Error> {
        let compiled: Result<Vec<Regex>, regex::Error> =
            expressions.iter().map(|expression| Regex::new(expression)).collect();
        compiled.map(Self)
    }

    /// The origin of a request, if its pages may read the response.
    pub(crate) fn of(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        if self.0.is_empty() {
            return None;
        }
        let origin = headers.get(header::ORIGIN)?;
        let text = origin.to_str().ok().filter(|text| !text.is_empty())?;
        self.0.iter().any(|expression| expression.is_match(text)).then(|| origin.clone())
    }
}

/// Lets the pages of an origin read the response with these headers.
pub(crate) fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let others = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "POST, GET, OPTIONS, PUT, DELETE, PATCH"),
        (
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            "Content-Type, Content-Length, Accept-Encoding, X-CSRF-Token, Authorization, X-Requested-With, \
             If-Modified-Since",
        ),
        (header::ACCESS_CONTROL_EXPOSE_HEADERS, "Date"),
        (header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true"),
    ];
    for (name, value) in others {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_matches_one_of_the_expressions() {
        let expressions = [r"//a\.example(:|$)".to_owned(), "^https://b$".to_owned()];
        let of = |expressions: &[String], origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.extend(origin.map(|origin| (header::ORIGIN, HeaderValue::from_static(origin))));
            AllowedOrigins::new(expressions).unwrap().of(&headers).is_some()
        };
        assert!(
            of(&expressions, Some("https://a.example")) && of(&expressions, Some("http://a.example:8080"))
        );
        assert!(of(&expressions, Some("https://b")));
        for other in ["https://a.example.evil", "https://xa.example", "https://b:1", "null", ""] {
            assert!(!of(&expressions, Some(other)), "{other}");
        }
        assert!(!of(&expressions, None) && !of(&[], Some("https://b")));
        assert!(AllowedOrigins::new(&["(".to_owned()]).is_err());
    }
}
