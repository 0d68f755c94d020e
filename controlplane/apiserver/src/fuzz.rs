//! What the fuzz targets of `integration/fuzz` call, and the test that replays their corpora with a stable compiler.

use crate::request::RequestInfo;

/// YAML bodies. A slow input is a failure: the fuzzer limits the time.
pub fn yaml(data: &[u8]) {
    let _refused = crate::body::parse_yaml(data);
}

/// Request lines. The input is a path with a query, and a line of the Accept header.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn the_corpora_are_replayed() {
        let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration/fuzz/corpus");
        for (name, target) in [("yaml", super::yaml as fn(&[u8])), ("request", super::request)] {
            let inputs: Vec<_> = std::fs::read_dir(corpora.join(name)).unwrap().collect();
            assert!(!inputs.is_empty(), "the corpus of {name} is empty");
            inputs.into_iter().for_each(|input| target(&std::fs::read(input.unwrap().path()).unwrap()));
        }
    }
}
