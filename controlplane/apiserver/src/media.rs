//! Content negotiation by parsed media types. Parameters may have any order.

use coracle_kinds::table::{Content, Include, MetaVersion};
use coracle_values::media_type::{MediaType, preferences};
use http::HeaderMap;

use crate::{
    error::{ApiError, OBJECT_TYPES, Result},
    request::Query,
};

/// The form of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// Unchanged objects and lists.
    Plain,
    /// A Table.
    Table(Content),
    /// PartialObjectMetadata or its list.
    Partial(MetaVersion),
    /// Unchanged objects and lists in protobuf.
    Protobuf,
    /// PartialObjectMetadata or its list in protobuf.
    PartialProtobuf(MetaVersion),
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

/// Media type of protobuf. In the `forms` of [`negotiate`] it means: unchanged objects may be written in protobuf.
pub(crate) const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
/// Media type of YAML. A response in YAML is the response in JSON with a few characters escaped, which is YAML in flow
/// style.
pub(crate) const YAML: &str = "application/yaml";
/// Form of [`negotiate`] for the metadata of one object.
pub(crate) const METADATA: &str = "PartialObjectMetadata";
/// Form of [`negotiate`] for the metadata of the objects of a list.
pub(crate) const METADATA_LIST: &str = "PartialObjectMetadataList";
/// Form of [`negotiate`] for PartialObjectMetadata in protobuf.
pub(crate) const PROTOBUF_METADATA: &str = "PartialObjectMetadata in protobuf";

/// The form of the response: the first form in the client's order of preference that the server supports. Unchanged
/// objects are written in protobuf only for clients that do not read JSON, because stored objects are already encoded
/// in JSON.
pub(crate) fn negotiate(headers: &HeaderMap, query: &Query, forms: &[&str]) -> Result<Form> {
    let accept = accepted(headers);
    if accept.trim().is_empty() {
        return Ok(Form::Plain);
    }
    let wanted = preferences(&accept);
    let reads_json = wanted.iter().any(|media| is_json(media) && media.name != YAML && is_plain(media));
    let is_plain_protobuf =
        |media: &MediaType<'_>| forms.contains(&PROTOBUF) && media.name == PROTOBUF && is_plain(media);
    let chosen = |media: &MediaType<'_>| {
        if !reads_json && is_plain_protobuf(media) {
            Some(Ok(Form::Protobuf))
        } else {
            form(media, query, forms)
        }
    };
    let form = wanted.iter().find_map(chosen).ok_or_else(ApiError::not_acceptable)??;
    match (form, query.get("includeObject")) {
        (Form::Table(_), include) if !matches!(include, "" | "None" | "Metadata" | "Object") => {
            Err(ApiError::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {include:?}: must be \
                 'Metadata', 'Object', 'None', or empty"
            )))
        }
        _ => Ok(form),
    }
}

/// Whether the client prefers YAML to JSON.
pub(crate) fn prefers_yaml(headers: &HeaderMap) -> bool {
    let accept = accepted(headers);
    let wanted = preferences(&accept);
    wanted.iter().find(|media| is_json(media)).is_some_and(|media| media.name == YAML)
}

/// All values of the header Accept.
pub(crate) fn accepted(headers: &HeaderMap) -> String {
    let values = headers.get_all(http::header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.collect::<Vec<_>>().join(",")
}

/// The form that a media type names. `None` if the server does not support it. An error if the server supports it, but
/// not for this response. Source: `AllowsMediaTypeTransform` and `doTransformObject` of `k8s.io/apiserver`.
fn form(media: &MediaType<'_>, query: &Query, forms: &[&str]) -> Option<Result<Form>> {
    let is_json = is_json(media);
    let Some(wanted) = media.parameter("as") else {
        return (is_json && is_plain(media)).then_some(Ok(Form::Plain));
    };
    let version = match (media.parameter("g")?, media.parameter("v")?) {
        ("meta.k8s.io", "v1") => MetaVersion::V1,
        ("meta.k8s.io", "v1beta1") => MetaVersion::V1Beta1,
        ("apidiscovery.k8s.io", "v2") => {
            let is_served = wanted == "APIGroupDiscoveryList" && forms.contains(&wanted);
            return (is_served && is_json && media.name != YAML).then_some(Ok(Form::Discovery));
        }
        _ => return None,
    };
    let include = || match query.get("includeObject") {
        "None" => Include::None,
        "Object" => Include::Object,
        _ => Include::Metadata,
    };
    match wanted {
        "Table" if is_json && forms.contains(&wanted) => {
            Some(Ok(Form::Table(Content { include: include(), version })))
        }
        METADATA | METADATA_LIST => metadata_form(media, wanted, version, forms),
        _ => None,
    }
}

/// The form of a response with metadata only. As upstream, the form of a list differs from the form of one object, and
/// the server does not try the client's next media type.
fn metadata_form(
    media: &MediaType<'_>,
    wanted: &str,
    version: MetaVersion,
    forms: &[&str],
) -> Option<Result<Form>> {
    let form = match &*media.name {
        PROTOBUF if forms.contains(&PROTOBUF_METADATA) => Form::PartialProtobuf(version),
        _ if is_json(media) => Form::Partial(version),
        _ => return None,
    };
    if forms.contains(&wanted) {
        return Some(Ok(form));
    }
    let is_list = forms.contains(&METADATA_LIST);
    (is_list || forms.contains(&METADATA)).then(|| Err(ApiError::other_form(wanted, is_list)))
}

/// The format of the request's body. The default is JSON.
pub(crate) fn body_type(headers: &HeaderMap) -> Result<BodyType> {
    let Some(value) = headers.get(http::header::CONTENT_TYPE) else { return Ok(BodyType::Json) };
    let text = value.to_str().unwrap_or_default();
    let name = MediaType::parse(text).map(|media| media.name).unwrap_or_default();
    match name.as_str() {
        "" | "application/json" => Ok(BodyType::Json),
        "application/yaml" | "application/x-yaml" | "text/yaml" => Ok(BodyType::Yaml),
        "application/vnd.kubernetes.protobuf" => Ok(BodyType::Protobuf),
        "application/json-patch+json" => Ok(BodyType::JsonPatch),
        "application/merge-patch+json" => Ok(BodyType::MergePatch),
        "application/strategic-merge-patch+json" => Ok(BodyType::StrategicPatch),
        "application/apply-patch+yaml" => Ok(BodyType::ApplyPatch),
        _ => Err(ApiError::unknown_body(OBJECT_TYPES)),
    }
}

/// Whether the media type is for unchanged objects. As upstream, each of the parameters `as`, `g` and `v` names a kind
/// to which the objects are converted.
fn is_plain(media: &MediaType<'_>) -> bool {
    ["as", "g", "v"].iter().all(|name| media.parameter(name).is_none())
}

/// Whether a response in JSON has this type. YAML contains JSON.
fn is_json(media: &MediaType<'_>) -> bool {
    matches!(media.name.as_str(), "application/json" | YAML | "application/*" | "*/*")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepting(accept: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(http::header::ACCEPT, accept.parse().unwrap());
        headers
    }

    fn negotiated(accept: &str) -> Option<Form> {
        let headers = accepting(accept);
        let forms = [
            "Table",
            "PartialObjectMetadata",
            "PartialObjectMetadataList",
            "APIGroupDiscoveryList",
            PROTOBUF,
            PROTOBUF_METADATA,
        ];
        negotiate(&headers, &Query::default(), &forms).ok()
    }

    #[test]
    fn parameters_may_come_in_any_order() {
        let table = Some(Form::Table(Content::default()));
        assert_eq!(negotiated("application/json;as=Table;v=v1;g=meta.k8s.io,application/json"), table);
        assert_eq!(negotiated("application/json;g=meta.k8s.io;v=v1;as=Table"), table);
        let discovery =
            "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        assert_eq!(negotiated(discovery), Some(Form::Discovery));
    }

    #[test]
    fn unsupported_media_types_are_skipped() {
        assert_eq!(negotiated("application/vnd.kubernetes.protobuf,application/json"), Some(Form::Plain));
        assert_eq!(negotiated("application/json;as=Table;v=v1alpha1,application/json"), Some(Form::Plain));
        assert_eq!(negotiated("application/json;q=0.5,*/*;q=0.1"), Some(Form::Plain));
        assert_eq!(negotiated("text/html"), None);
    }

    #[test]
    fn lists_and_objects_have_metadata_of_their_own_form() {
        let one = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let list = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        for (accept, form, expect) in [
            (one, METADATA, Ok(Form::Partial(MetaVersion::V1))),
            (list, METADATA_LIST, Ok(Form::Partial(MetaVersion::V1))),
            (
                one,
                METADATA_LIST,
                Err("you requested PartialObjectMetadata, but the requested object is a list"),
            ),
            (
                list,
                METADATA,
                Err("you requested PartialObjectMetadataList, but the requested object is not a list"),
            ),
        ] {
            let found = |accept: &str| negotiate(&accepting(accept), &Query::default(), &["Table", form]);
            let message = found(accept).map_err(|error| (error.code, error.message));
            assert_eq!(message, expect.map_err(|why| (406, why.to_owned())), "{accept} {form}");
            // The next media type is not tried.
            assert_eq!(
                found(&format!("{accept},application/json")).is_ok(),
                expect.is_ok(),
                "{accept} {form}"
            );
        }
        let other = negotiate(&accepting(one), &Query::default(), &["Table"]).unwrap_err();
        assert!(other.message.starts_with("only the following media types"), "{}", other.message);
    }

    #[test]
    fn a_conversion_names_the_group_and_the_version() {
        for accept in [
            "application/json;as=Table;v=v1",
            "application/json;as=Table;v=v1;g=apps",
            "application/json;as=Table;g=meta.k8s.io",
            "application/json;v=v1",
            "application/json;as=APIGroupDiscoveryList;v=v2;g=meta.k8s.io",
        ] {
            assert_eq!(negotiated(accept), None, "{accept}");
            assert_eq!(negotiated(&format!("{accept},application/json")), Some(Form::Plain), "{accept}");
        }
    }

    #[test]
    fn named_types_precede_wildcards() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        assert_eq!(negotiated(&format!("*/*,{table}")), Some(Form::Table(Content::default())));
        assert_eq!(negotiated(&format!("application/*,{table}")), Some(Form::Table(Content::default())));
        assert_eq!(negotiated(&format!("*/*,{table};q=0.9")), Some(Form::Plain));
        assert!(prefers_yaml(&accepting("*/*,application/yaml")));
    }

    #[test]
    fn yaml_is_json_with_another_name() {
        let prefers = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(http::header::ACCEPT, accept.parse().unwrap());
            prefers_yaml(&headers)
        };
        assert_eq!(negotiated("application/yaml"), Some(Form::Plain));
        assert!(prefers("application/yaml") && prefers("text/html,application/yaml,application/json"));
        assert!(!prefers("application/json,application/yaml") && !prefers("*/*") && !prefers("text/html"));
        assert!(!prefers("application/yaml;q=0.5,application/json"));
        assert_eq!(negotiated(&format!("{PROTOBUF},application/yaml")), Some(Form::Protobuf));
    }

    #[test]
    fn tables_have_known_objects_only() {
        let of = |accept: &str, include: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(http::header::ACCEPT, accept.parse().unwrap());
            negotiate(&headers, &Query::parse(&format!("includeObject={include}")), &["Table"])
        };
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        for known in ["", "None", "Metadata", "Object"] {
            assert!(of(table, known).is_ok(), "{known}");
        }
        let error = of(table, "Nope").unwrap_err();
        let expect = "Unable to convert to Table as requested: includeObject: Invalid value: \"Nope\": must be \
                      'Metadata', 'Object', 'None', or empty";
        assert_eq!((error.code, &*error.message), (400, expect));
        assert_eq!(of("application/json", "Nope").ok(), Some(Form::Plain));
    }

    #[test]
    fn old_versions_and_protobuf_are_served() {
        let old = Content { include: Include::Metadata, version: MetaVersion::V1Beta1 };
        assert_eq!(negotiated("application/json;as=Table;v=v1beta1;g=meta.k8s.io"), Some(Form::Table(old)));
        assert_eq!(negotiated(PROTOBUF), Some(Form::Protobuf));
        assert_eq!(negotiated("application/json,application/vnd.kubernetes.protobuf"), Some(Form::Plain));
        let metadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let wanted = format!("{metadata},application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1");
        assert_eq!(negotiated(&wanted), Some(Form::PartialProtobuf(MetaVersion::V1)));
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        assert_eq!(negotiated(&format!("{PROTOBUF},{table}")), Some(Form::Protobuf), "the client's order");
        assert_eq!(negotiated(&format!("{PROTOBUF};q=0")), None);
        assert_eq!(negotiated(&format!("{PROTOBUF},application/json;q=0")), Some(Form::Protobuf));
        assert_eq!(negotiate(&HeaderMap::new(), &Query::default(), &[]).ok(), Some(Form::Plain));
        let mut headers = HeaderMap::new();
        headers.insert(http::header::ACCEPT, PROTOBUF.parse().unwrap());
        assert!(negotiate(&headers, &Query::default(), &[]).is_err(), "a kind without a protobuf form");
    }
}
