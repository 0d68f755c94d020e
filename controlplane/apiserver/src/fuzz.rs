//! Functions that the fuzz targets of `integration/fuzz` call, and the test that replays their corpora with a stable
//! compiler.

use coracle_cel::{Bounds, Environment, Limits, PER_CALL_LIMIT, Program, Type, Value, pattern};

use crate::request::RequestInfo;

/// YAML bodies. The fuzzer limits the time: a slow input is a failure.
pub fn yaml(data: &[u8]) {
    let _refused = crate::body::parse_yaml(data);
}

/// Request lines. The input is a path with a query, and optionally a line with an Accept header.
pub fn request(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (target, accept) = text.split_once('\n').unwrap_or((&text, ""));
    let Ok(uri) = target.parse::<http::Uri>() else { return };
    let mut headers = http::HeaderMap::new();
    if let Ok(accept) = http::HeaderValue::from_str(accept) {
        headers.insert(http::header::ACCEPT, accept.clone());
        headers.insert(http::header::CONTENT_TYPE, accept);
    }
    for method in [http::Method::GET, http::Method::POST, http::Method::DELETE] {
        let info = RequestInfo::parse(&method, &uri);
        assert!(!info.verb.is_empty(), "{method} {uri} has no verb: no rule would decide on it");
        let _refused = info.query.check_number("limit");
        let _refused = crate::media::negotiate(&headers, &info.query, &["Table", "PartialObjectMetadata"]);
    }
    let _refused = crate::media::body_type(&headers);
}

/// Bearer tokens of service accounts and of OpenID Connect issuers, with and without the check of their signature.
pub fn token(data: &[u8]) {
    let Ok(token) = std::str::from_utf8(data) else { return };
    crate::authn::fuzz(token);
}

/// Expressions of definitions and policies. The input is an expression and a JSON document, with a line end between
/// them. The document is the variable `self`.
pub fn cel(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (source, object) = text.split_once('\n').unwrap_or((&text, "null"));
    let environment = Environment::default().variable("self", Type::Dyn).with_structures();
    let kind = Type::Dyn;
    let bounds = Bounds::leaf(100, 1);
    let limits = Limits { variable: None, bounds: &bounds };
    let Ok((program, _estimate)) = Program::compile_with_cost(source, &environment, limits) else { return };
    let object = serde_json::from_str(object).unwrap_or_default();
    let (result, cost) = program.evaluate(&[("self", Value::from_json(&object, &kind))]);
    // One step may exceed the limit.
    assert!(cost <= 2 * PER_CALL_LIMIT, "the cost is {cost}");
    if let Ok(value) = result {
        let _json = value.to_limited_json();
    }
}

/// Regular expressions in the syntax of Go, and a text that they search, with a line end between them.
pub fn pattern(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (source, searched) = text.split_once('\n').unwrap_or((&text, ""));
    if let Ok(compiled) = pattern::compile(source, pattern::MAX_BYTES) {
        let _found = compiled.is_match(searched);
    }
}

/// Pages of proxied servers, whose links are rewritten.
pub fn page(data: &[u8]) {
    crate::sub::proxy::fuzz_page(data);
}

/// OpenAPI documents of version 2 of aggregated servers.
pub fn openapi(data: &[u8]) {
    crate::aggregation::fuzz_conversion(data);
}

/// Discovery documents of aggregated servers.
pub fn remote_resources(data: &[u8]) {
    crate::aggregation::discovery::fuzz(data);
}

/// A client's WebSocket frames during a log or a watch.
pub fn log_socket(data: &[u8]) {
    crate::socket_body::fuzz(data);
}

/// The bytes of an HTTP/2 client before its authentication. The server searches these bytes for incomplete headers.
pub fn frames(data: &[u8]) {
    crate::listen::fuzz_frames(data);
}

/// The discovery document and the key set of an OpenID Connect issuer, with a line end between them.
pub fn issuer_keys(data: &[u8]) {
    crate::authn::fuzz_keys(data);
}

/// Responses of the webhooks of authentication and authorization: TokenReview and SubjectAccessReview.
pub fn access_review(data: &[u8]) {
    crate::authn::fuzz_review(data);
    crate::authz::fuzz_review(data);
}

/// Responses of admission webhooks, and their patches.
pub fn review(data: &[u8]) {
    crate::admit::fuzz_review(data);
}

/// Responses of conversion webhooks: ConversionReview.
pub fn conversion_review(data: &[u8]) {
    crate::custom_resources::fuzz_conversion(data);
}

/// Responses of image policy webhooks: ImageReview.
pub fn image_review(data: &[u8]) {
    crate::admit::fuzz_image_review(data);
}

/// Two summaries of the usage of a node, with a line end between them.
pub fn node_summary(data: &[u8]) {
    crate::usage_samples::fuzz(data);
}

/// Continue tokens of lists.
pub fn continue_token(data: &[u8]) {
    crate::verb::list::fuzz(data);
}

/// Backup files. A damaged or hostile file is refused.
pub fn backup(data: &[u8]) {
    let _refused = coracle_store::verify_backup(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpora_are_replayed() {
        let targets = [
            ("yaml", super::yaml as fn(&[u8])),
            ("request", super::request),
            ("token", super::token),
            ("cel", super::cel),
            ("pattern", super::pattern),
            ("backup", super::backup),
            ("page", super::page),
            ("openapi", super::openapi),
            ("review", super::review),
            ("remote_resources", super::remote_resources),
            ("log_socket", super::log_socket),
            ("frames", super::frames),
            ("issuer_keys", super::issuer_keys),
            ("access_review", super::access_review),
            ("conversion_review", super::conversion_review),
            ("image_review", super::image_review),
            ("node_summary", super::node_summary),
            ("continue_token", super::continue_token),
        ];
        for (name, target) in targets {
            coracle_testing::replay_corpus(name, target);
        }
    }
}
