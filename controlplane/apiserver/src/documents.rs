//! Documents about the API server: discovery, OpenAPI, version, token issuer.

use std::{collections::BTreeSet, io};

use coracle_kinds::{Resources, discovery, openapi};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::{
    aggregation::{discovery as remote, openapi as remote_openapi},
    compression,
    error::{ApiError, Result},
    health,
    media::{self, Form},
    merged_openapi::{self, Packed, VersionDocument, tag},
    metrics, offload,
    reply::{self, Reply},
    request::RequestInfo,
    state::State,
    version::version,
};

const DISCOVERY: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
/// Paths that are always served.
const PATHS: [&str; 13] = [
    "/.well-known/openid-configuration",
    "/api",
    "/api/v1",
    "/apis",
    "/flagz",
    "/healthz",
    "/livez",
    "/openapi/v2",
    "/openapi/v3",
    "/openid/v1/jwks",
    "/readyz",
    "/statusz",
    "/version",
];

/// The document at a path. `None` if the path has no document.
pub(crate) fn find(state: &State, info: &RequestInfo, headers: &HeaderMap) -> Result<Option<Reply>> {
    let resources = &**state.registry.load();
    let path: Vec<&str> = info.path.split('/').filter(|part| !part.is_empty()).collect();
    let value = match path.as_slice() {
        ["api"] if aggregated(info, headers)? => {
            return Ok(Some(discovery_list(headers, &discovery::aggregated_core(resources))));
        }
        ["apis"] if aggregated(info, headers)? => {
            let mut list = discovery::aggregated_groups(resources);
            remote::add_resources(&state.remotes, resources, &mut list);
            return Ok(Some(discovery_list(headers, &list)));
        }
        ["api"] => Some(discovery::api_versions(&state.advertise.to_string())),
        ["apis"] => {
            let mut list = discovery::api_group_list(resources);
            remote::add_groups(&state.remotes, resources, &mut list);
            Some(list)
        }
        ["api", version] => discovery::resource_list(resources, "", version),
        ["apis", group] => remote::group(&state.remotes, resources, group),
        ["apis", group, version] => discovery::resource_list(resources, group, version),
        ["openapi", "v2"] => return openapi_v2(state, info, headers).map(Some),
        ["openapi", "v3"] => {
            // The hash of a new or changed custom resource is computed from its whole schema.
            let is_heavy = resources.group_versions().iter().any(|version| version.openapi_hash().is_none());
            let mut root = offload::run(is_heavy, || openapi::root(resources));
            remote_openapi::add_v3(&state.remotes, &mut root);
            Some(root)
        }
        ["openapi", "v3", rest @ ..] => {
            return openapi_v3(state, info, headers, &rest.join("/"));
        }
        ["version"] => Some(version()),
        ["debug", "api_priority_and_fairness", page] if state.priority_and_fairness => {
            let text = state.flow_control.debug_page(page, &info.query);
            return Ok(text.map(|text| reply::text(200, text)));
        }
        ["statusz"] => return state.pages.statusz(headers).map(Some),
        ["flagz"] => return state.pages.flagz(headers).map(Some),
        [".well-known", "openid-configuration"] => {
            return Ok(Some(of_issuer(state, "application/json", &issuer(state))));
        }
        ["openid", "v1", "jwks"] => {
            let keys = state.authenticators.tokens.keys.key_set();
            return Ok(Some(of_issuer(state, "application/jwk-set+json", &keys)));
        }
        [] => Some(index(state, resources)),
        _ => None,
    };
    Ok(value.map(|value| reply::json(200, &value)))
}

fn aggregated(info: &RequestInfo, headers: &HeaderMap) -> Result<bool> {
    Ok(media::negotiate(headers, &info.query, &["APIGroupDiscoveryList"])? == Form::Discovery)
}

fn discovery_list(headers: &HeaderMap, list: &Value) -> Reply {
    let text = list.to_string();
    let tag = tag(text.as_bytes());
    let mut reply = if matches(headers, &tag) { not_modified() } else { reply::bytes(200, DISCOVERY, text) };
    set(&mut reply, header::ETAG, &tag);
    set(&mut reply, header::VARY, "Accept");
    reply
}

/// Media types that request the OpenAPI v2 document as protobuf. The response always has the first type. client-go
/// requests the second type, but cannot parse it in a response: RFC 2045 allows no `@` in a media type.
const OPENAPI_V2_PROTOBUF: [&str; 2] = [
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
];

fn openapi_v2(state: &State, info: &RequestInfo, headers: &HeaderMap) -> Result<Reply> {
    let accept = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut names = accept.flat_map(|value| value.split(',')).filter_map(|part| part.split(';').next());
    let is_protobuf = names.any(|name| OPENAPI_V2_PROTOBUF.contains(&name.trim()));
    if !is_protobuf {
        media::negotiate(headers, &info.query, &[])?;
    }
    let (form, media) = match is_protobuf {
        true => (merged_openapi::Form::Protobuf, OPENAPI_V2_PROTOBUF[0]),
        false => (merged_openapi::Form::Json, "application/json"),
    };
    let document = {
        let resources = state.registry.load();
        state.merged.find(&resources, &state.remotes, form, |tag| matches(headers, tag))
    };
    let document = document.ok_or_else(|| ApiError::internal("cannot write the OpenAPI document"))?;
    let mut reply = packed(state, info, headers, media, document.body.as_ref());
    set(&mut reply, header::ETAG, &document.tag);
    Ok(reply)
}

/// The OpenAPI v3 document of this server, or the document that this server converts for an aggregated server.
fn openapi_v3(state: &State, info: &RequestInfo, headers: &HeaderMap, path: &str) -> Result<Option<Reply>> {
    let is_known = |hash: &str| matches(headers, &quoted(hash));
    let failed = |error: io::Error| ApiError::internal(format!("cannot write the OpenAPI document: {error}"));
    let own = state.merged.versions.find(&state.registry.load(), path, is_known).map_err(failed)?;
    let document = match own {
        Some(own) => Some(own),
        None => converted_v3(state, info, is_known).map_err(failed)?,
    };
    let Some(document) = document else { return Ok(None) };
    let mut reply = packed(state, info, headers, "application/json", document.body.as_ref());
    set(&mut reply, header::ETAG, &quoted(&document.hash));
    // A document that is requested with its hash in the URL never changes.
    if info.query.get("hash") == document.hash {
        set(&mut reply, header::CACHE_CONTROL, "public, immutable");
    }
    Ok(Some(reply))
}

/// The OpenAPI v3 document that this server converts for an aggregated server without OpenAPI v3.
fn converted_v3(
    state: &State,
    info: &RequestInfo,
    is_known: impl Fn(&str) -> bool,
) -> io::Result<Option<VersionDocument>> {
    let documents = &state.merged.versions;
    let Some(remote) = state.remotes.find(&info.path) else { return Ok(None) };
    let Some(hash) = remote_openapi::converted_hash(&remote) else {
        // The aggregated server has a new document, and the hash of its conversion is not known yet.
        let Some(document) = remote_openapi::converted_v3(&remote) else { return Ok(None) };
        let body = documents.with_hash(&document.hash, |out| out.write_all(document.text.as_bytes()))?;
        return Ok(Some(VersionDocument { hash: document.hash, body: Some(body) }));
    };
    if is_known(&hash) {
        return Ok(Some(VersionDocument { hash, body: None }));
    }
    let written = documents.with_hash(&hash, |out| {
        let document = remote_openapi::converted_v3(&remote).filter(|document| document.hash == hash);
        out.write_all(document.ok_or(io::ErrorKind::NotFound)?.text.as_bytes())
    });
    match written {
        Ok(body) => Ok(Some(VersionDocument { hash, body: Some(body) })),
        // The document has changed meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The response with a document, compressed if the client accepts gzip. Without a body, the response is 304: the client
/// has the document.
fn packed(
    state: &State,
    info: &RequestInfo,
    headers: &HeaderMap,
    media: &'static str,
    body: Option<&Packed>,
) -> Reply {
    // For YAML, the text is converted later, so it must not be compressed here.
    let is_compressed = state.features.response_compression
        && compression::is_wanted(info, headers)
        && !media::prefers_yaml(headers);
    let mut reply = match body {
        None => not_modified(),
        Some(body) => match body.gzip().filter(|_| is_compressed) {
            Some(gzip) => {
                let mut reply = reply::bytes(200, media, gzip);
                set(&mut reply, header::CONTENT_ENCODING, "gzip");
                reply
            }
            None => reply::bytes(200, media, "").map(|_empty| body.text()),
        },
    };
    set(&mut reply, header::VARY, "Accept-Encoding, Accept");
    reply
}

/// The ETag for a document hash.
fn quoted(hash: &str) -> String {
    format!("\"{hash}\"")
}

fn not_modified() -> Reply {
    // The response has no content type, because clients replace the headers of their cached response by the headers of
    // this response.
    let mut reply = Reply::new(reply::full(""));
    *reply.status_mut() = StatusCode::NOT_MODIFIED;
    reply
}

fn matches(headers: &HeaderMap, tag: &str) -> bool {
    let known = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok()).unwrap_or_default();
    known.split(',').any(|one| one.trim() == tag)
}

fn set(reply: &mut Reply, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
}

/// The paths of this server, sorted.
fn index(state: &State, resources: &Resources) -> Value {
    let mut list = discovery::api_group_list(resources);
    remote::add_groups(&state.remotes, resources, &mut list);
    let mut paths: BTreeSet<String> =
        PATHS.into_iter().chain([metrics::PATH, metrics::SLI_PATH]).map(str::to_owned).collect();
    paths.extend(health::paths(state));
    for group in list["groups"].as_array().into_iter().flatten() {
        let versions = group["versions"].as_array().into_iter().flatten();
        let names = versions.map(|version| &version["groupVersion"]).chain([&group["name"]]);
        paths.extend(names.filter_map(Value::as_str).map(|name| format!("/apis/{name}")));
    }
    json!({"paths": paths})
}

/// A document about the issuer of tokens. As upstream, clients may cache it for an hour, unless an external signer has
/// the keys: it can change them at any time.
fn of_issuer(state: &State, media: &'static str, document: &Value) -> Reply {
    let mut reply = reply::bytes(200, media, document.to_string());
    if state.authenticators.tokens.keys.are_own() {
        set(&mut reply, header::CACHE_CONTROL, "public, max-age=3600");
    }
    reply
}

fn issuer(state: &State) -> Value {
    let tokens = &state.authenticators.tokens;
    let own = || format!("https://{}/openid/v1/jwks", state.advertise);
    json!({
        "issuer": tokens.issuer(),
        "jwks_uri": state.keys_url.clone().unwrap_or_else(own),
        "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": tokens.keys.algorithms(),
    })
}
