//! The labels of the metrics of one request.

use coracle_kinds::{Resource, Resources};
use http::HeaderMap;

use crate::{media, request::RequestInfo};

/// Labels of a request, in the order of [`Request::labels`].
pub(super) const LABELS: [&str; 8] =
    ["verb", "dry_run", "group", "version", "resource", "subresource", "scope", "component"];
/// Labels of the SLI durations. Dry runs are not counted there.
pub(super) const SLI_LABELS: [&str; 7] =
    ["verb", "group", "version", "resource", "subresource", "scope", "component"];
/// Labels of a deprecated API.
pub(super) const DEPRECATED_LABELS: [&str; 5] =
    ["group", "version", "resource", "subresource", "removed_release"];

/// The labels of one request.
pub(crate) struct Request {
    verb: &'static str,
    pub(super) dry_run: &'static str,
    group: String,
    version: String,
    resource: String,
    subresource: String,
    scope: &'static str,
    pub(super) is_long: bool,
    /// Whether the version of the resource is deprecated.
    pub(super) is_deprecated: bool,
}

// === impl Request ===

impl Request {
    pub(crate) fn of(info: &RequestInfo, headers: &HeaderMap, resources: &Resources, is_long: bool) -> Self {
        let path = info.resource.as_ref();
        let kind = path.and_then(|path| path.find(resources)).map(|kind| &**kind);
        let subresource = path.map_or("", |path| path.subresource.as_str());
        let subresource = kind.and_then(|kind: &Resource| kind.subresource(subresource)).map(|_| subresource);
        let scope = match (path, kind) {
            (Some(path), Some(_)) if !path.name.is_empty() => "resource",
            (Some(path), Some(_)) if !path.namespace.is_empty() => "namespace",
            (_, Some(_)) => "cluster",
            _ => "",
        };
        Self {
            verb: verb(info.verb, headers),
            dry_run: if info.query.get("dryRun") == "All" { "All" } else { "" },
            group: kind.map(|kind| kind.group.clone().into_owned()).unwrap_or_default(),
            version: kind.map(|kind| kind.version.clone().into_owned()).unwrap_or_default(),
            resource: kind.map(|kind| kind.plural.clone().into_owned()).unwrap_or_default(),
            subresource: subresource.unwrap_or_default().to_owned(),
            scope,
            is_long,
            is_deprecated: kind.is_some_and(|kind| kind.deprecation.is_some()),
        }
    }

    /// Whether the request reads an object or a list.
    pub(super) fn is_read(&self) -> bool {
        matches!(self.verb, "GET" | "LIST") && !self.is_long
    }

    /// The labels of a deprecated API. `removed_release` is empty: the release that removes the version is not known.
    pub(super) fn deprecated_labels(&self) -> [&str; 5] {
        [&self.group, &self.version, &self.resource, &self.subresource, ""]
    }

    /// The labels without the label of dry runs.
    pub(super) fn sli_labels(&self) -> [&str; 7] {
        let [verb, _dry_run, group, version, resource, subresource, scope, component] = self.labels();
        [verb, group, version, resource, subresource, scope, component]
    }

    pub(super) fn labels(&self) -> [&str; 8] {
        [
            self.verb,
            self.dry_run,
            &self.group,
            &self.version,
            &self.resource,
            &self.subresource,
            self.scope,
            "apiserver",
        ]
    }
}

/// The verb as upstream reports it.
fn verb(verb: &str, headers: &HeaderMap) -> &'static str {
    match verb {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" | "post" => "POST",
        "update" | "put" => "PUT",
        "patch" if matches!(media::body_type(headers), Ok(media::BodyType::ApplyPatch)) => "APPLY",
        "patch" => "PATCH",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        "head" => "HEAD",
        "options" => "OPTIONS",
        _ => "other",
    }
}
