//! GET of a collection: selectors, pages, and as of which revision.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use coracle_kinds::{
    Resource,
    selector::{FieldSelector, LabelSelector},
};
use serde_json::json;

use crate::{
    cache::{Object, Scope, prefix_of},
    call::Call,
    convert,
    error::{ApiError, Result},
    reply::{self, Reply},
    verb::version_fields,
};

/// Where the next page starts and as of which revision.
#[derive(serde::Serialize, serde::Deserialize)]
struct Continue {
    rv: u64,
    start: String,
}

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let mut scope = scope(call)?;
    let fields = version_fields::take(&call.kind, &mut scope);
    let (mut objects, revision) = snapshot(call, &scope)?;
    if let Some(fields) = fields {
        objects.retain(|object| scope.selects(&call.kind, object));
        objects = version_fields::select(&call.kind, &fields, objects).await?;
    }
    let limit = call.info.query.number("limit").filter(|limit| *limit > 0);
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let mut page: Vec<Arc<Object>> = Vec::new();
    let mut meta = json!({"resourceVersion": revision.to_string()});
    let mut candidates = objects.into_iter();
    for object in candidates.by_ref() {
        if !scope.selects(&call.kind, &object) {
            continue;
        }
        if page.len() == limit {
            let next = Continue { rv: revision, start: object.key.to_string() };
            let token = serde_json::to_vec(&next).map_err(ApiError::internal)?;
            meta["continue"] = BASE64_URL_SAFE_NO_PAD.encode(token).into();
            if scope.is_plain() {
                meta["remainingItemCount"] = (candidates.len() + 1).into();
            }
            break;
        }
        page.push(object);
    }
    let page = convert::objects(&call.kind, page).await?;
    Ok(reply::list(call.form()?, call.kind.clone(), page, meta))
}

/// What the query selects.
pub(crate) fn scope(call: &Call) -> Result<Scope> {
    scope_of(call, &call.kind)
}

/// What the query selects of this kind.
pub(crate) fn scope_of(call: &Call, kind: &Resource) -> Result<Scope> {
    let query = &call.info.query;
    for number in ["limit", "timeoutSeconds"] {
        query.check_number(number)?;
    }
    let bad = |error: coracle_kinds::selector::SelectorError| ApiError::bad_request(error.to_string());
    let labels = match query.get("labelSelector") {
        "" => LabelSelector::default(),
        text => LabelSelector::parse(text).map_err(bad)?,
    };
    let fields = match query.get("fieldSelector") {
        "" => FieldSelector::default(),
        text => FieldSelector::parse(kind, text).map_err(bad)?,
    };
    Ok(Scope { prefix: prefix_of(kind, call.namespace()), labels, fields })
}

/// The objects of the scope's prefix, from the page's start on, and the revision they are of.
fn snapshot(call: &Call, scope: &Scope) -> Result<(Vec<Arc<Object>>, u64)> {
    let query = &call.info.query;
    let token = query.get("continue");
    let cache = &call.state.cache;
    if !token.is_empty() {
        let next = parse_token(token)?;
        let mut objects =
            cache.of(&call.kind)?.lock().under_at(&scope.prefix, next.rv).map_err(|_expired| {
                ApiError::expired(
                    "The provided continue parameter is too old to display a consistent list result. \
                 You must start a new list without the continue parameter.",
                )
            })?;
        objects.retain(|object| *object.key >= *next.start);
        return Ok((objects, next.rv));
    }
    let collection = cache.of(&call.kind)?;
    let objects = collection.lock();
    let newest = cache.revision().max(objects.newest());
    match (revision(query.get("resourceVersion"))?, query.get("resourceVersionMatch")) {
        (None, "") => {}
        (None, _) => {
            return Err(ApiError::unprocessable(
                "resourceVersionMatch is forbidden unless resourceVersion is provided",
            ));
        }
        (Some(asked), _) if asked > newest => return Err(ApiError::future_revision(asked, newest)),
        (Some(asked), "Exact") => return Ok((objects.under_at(&scope.prefix, asked)?, asked)),
        (Some(_), "" | "NotOlderThan") => {}
        (Some(_), other) => {
            return Err(ApiError::unprocessable(format!(
                "resourceVersionMatch: Unsupported value: \"{other}\""
            )));
        }
    }
    // One name: no need to look at the others.
    let found = match scope.fields.exact_name() {
        Some(name) if !scope.prefix.ends_with("//") && is_single(call) => {
            objects.get(&format!("{}{name}", scope.prefix)).into_iter().collect()
        }
        _ => objects.under(&scope.prefix).cloned().collect(),
    };
    Ok((found, newest))
}

/// Whether a name alone identifies the object: the kind is cluster-scoped, or the request has a namespace.
fn is_single(call: &Call) -> bool {
    !call.kind.namespaced || !call.namespace().is_empty()
}

pub(crate) fn revision(text: &str) -> Result<Option<u64>> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_not_a_number| {
        ApiError::bad_request(format!(
            "resourceVersion: Invalid value: \"{text}\": strconv.ParseUint: invalid syntax"
        ))
    })
}

fn parse_token(token: &str) -> Result<Continue> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(token).unwrap_or_default();
    serde_json::from_slice(&bytes).map_err(|_malformed| ApiError::bad_request("continue key is not valid"))
}
