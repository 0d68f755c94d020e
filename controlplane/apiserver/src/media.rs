//! Content negotiation by parsed media types. Parameters may have any order.

use coracle_kinds::table::Include;
use http::HeaderMap;

use crate::{
    error::{ApiError, Result},
    request::Query,
};

/// The form of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Unchanged objects and lists.
    Plain,
    /// `meta.k8s.io/v1` Table.
    Table(Include),
    /// `meta.k8s.io/v1` PartialObjectMetadata or its list.
    Partial,
    /// `APIGroupDiscoveryList` of `apidiscovery.k8s.io/v2`.
    Discovery,
}

/// The format of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyType {
    Json,
    Yaml,
    Protobuf,
    JsonPatch,
    MergePatch,
    StrategicPatch,
    ApplyPatch,
}

struct MediaType<'a> {
    name: String,
    parameters: Vec<(&'a str, &'a str)>,
}

/// The form of the response: the first one in the client's order of preference that the server supports.
pub(crate) fn negotiate(headers: &HeaderMap, query: &Query, forms: &[&str]) -> Result<Form> {
    let accept: Vec<&str> =
        headers.get_all(http::header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let accept = accept.join(",");
    if accept.trim().is_empty() {
        return Ok(Form::Plain);
    }
    let mut wanted: Vec<MediaType<'_>> = accept.split(',').filter_map(parse).collect();
    // A stable sort: equal preferences stay in the client's order.
    wanted.sort_by_key(|media| std::cmp::Reverse(media.quality()));
    wanted.iter().find_map(|media| form(media, query, forms)).ok_or_else(ApiError::not_acceptable)
}

fn form(media: &MediaType<'_>, query: &Query, forms: &[&str]) -> Option<Form> {
    if !matches!(media.name.as_str(), "application/json" | "application/*" | "*/*") {
        return None;
    }
    let Some(wanted) = media.parameter("as") else { return Some(Form::Plain) };
    if !forms.contains(&wanted) {
        return None;
    }
    match (wanted, media.parameter("v")?) {
        ("Table", "v1") => Some(Form::Table(match query.get("includeObject") {
            "None" => Include::None,
            "Object" => Include::Object,
            _ => Include::Metadata,
        })),
        ("PartialObjectMetadata" | "PartialObjectMetadataList", "v1") => Some(Form::Partial),
        ("APIGroupDiscoveryList", "v2") => Some(Form::Discovery),
        _ => None,
    }
}

/// The format of the request's body. The default is JSON.
pub(crate) fn body_type(headers: &HeaderMap) -> Result<BodyType> {
    let Some(value) = headers.get(http::header::CONTENT_TYPE) else { return Ok(BodyType::Json) };
    let text = value.to_str().unwrap_or_default();
    let name = parse(text).map(|media| media.name).unwrap_or_default();
    match name.as_str() {
        "" | "application/json" => Ok(BodyType::Json),
        "application/yaml" | "application/x-yaml" | "text/yaml" => Ok(BodyType::Yaml),
        "application/vnd.kubernetes.protobuf" => Ok(BodyType::Protobuf),
        "application/json-patch+json" => Ok(BodyType::JsonPatch),
        "application/merge-patch+json" => Ok(BodyType::MergePatch),
        "application/strategic-merge-patch+json" => Ok(BodyType::StrategicPatch),
        "application/apply-patch+yaml" | "application/apply-patch+cbor" => Ok(BodyType::ApplyPatch),
        _ => Err(ApiError::unsupported_media_type(format!(
            "the body of the request was in an unknown format - accepted media types include: \
             application/json, application/yaml, application/vnd.kubernetes.protobuf (not {text})"
        ))),
    }
}

fn parse(text: &str) -> Option<MediaType<'_>> {
    let mut parts = text.split(';').map(str::trim);
    let name = parts.next().filter(|name| !name.is_empty())?.to_ascii_lowercase();
    let parameters = parts
        .filter_map(|part| part.split_once('='))
        .map(|(key, value)| (key.trim(), value.trim()))
        .collect();
    Some(MediaType { name, parameters })
}

impl MediaType<'_> {
    fn parameter(&self, key: &str) -> Option<&str> {
        self.parameters.iter().find(|(name, _)| *name == key).map(|(_, value)| value.trim_matches('"'))
    }

    /// The quality in thousandths.
    fn quality(&self) -> u32 {
        let quality = self.parameter("q").and_then(|q| q.parse::<f32>().ok()).unwrap_or(1.0);
        // A quality is between 0 and 1.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=1000")]
        let thousandths = (quality.clamp(0.0, 1.0) * 1000.0) as u32;
        thousandths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn negotiated(accept: &str) -> Option<Form> {
        let mut headers = HeaderMap::new();
        headers.insert(http::header::ACCEPT, accept.parse().unwrap());
        let forms = ["Table", "PartialObjectMetadata", "PartialObjectMetadataList", "APIGroupDiscoveryList"];
        negotiate(&headers, &Query::default(), &forms).ok()
    }

    #[test]
    fn parameters_may_come_in_any_order() {
        let table = Some(Form::Table(Include::Metadata));
        assert_eq!(negotiated("application/json;as=Table;v=v1;g=meta.k8s.io,application/json"), table);
        assert_eq!(negotiated("application/json;g=meta.k8s.io;v=v1;as=Table"), table);
        let discovery =
            "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        assert_eq!(negotiated(discovery), Some(Form::Discovery));
    }

    #[test]
    fn what_cannot_be_served_is_passed_over() {
        assert_eq!(negotiated("application/vnd.kubernetes.protobuf,application/json"), Some(Form::Plain));
        assert_eq!(negotiated("application/json;as=Table;v=v1beta1,application/json"), Some(Form::Plain));
        assert_eq!(negotiated("application/json;q=0.5,*/*;q=0.1"), Some(Form::Plain));
        assert_eq!(negotiated("text/html"), None);
    }
}
