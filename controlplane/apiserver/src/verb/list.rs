//! GET of a collection: selectors, pages, and the revision of the list.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use coracle_kinds::{
    Resource,
    selector::{FieldSelector, LabelSelector},
};
use serde_json::json;

use crate::{
    cache::{Collection, Object, Scope, prefix_of},
    call::Call,
    convert,
    error::{ApiError, Result},
    in_flight::{BodyMemory, requester},
    media::Form,
    reply::{self, Reply},
    request::{Query, parse_revision},
    verb::{list_options, version_fields},
};

/// Lifetime of a continue token in seconds. Upstream compacts its history at this interval.
const TOKEN_LIFETIME_SECONDS: u64 = 300;

/// The continue token: the start of the next page, and the revision of the list.
#[derive(Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Continue {
    /// Revision of the list. 0 means the newest revision; such a list is not consistent.
    rv: u64,
    start: String,
    /// Time at which the first page was created, in seconds since 1970. A token of the newest revision does not expire.
    #[serde(default)]
    issued: u64,
}

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let mut scope = scope(call)?;
    let fields = version_fields::take(&call.kind, &mut scope);
    list_options::check(call, false)?;
    let earlier = token(call)?;
    let issued = earlier.as_ref().filter(|token| token.rv != 0).map_or_else(now, |token| token.issued);
    let (mut objects, revision) = snapshot(call, &scope, earlier)?;
    let (is_converted, mut memory) = (fields.is_some(), BodyMemory::default());
    if let Some(fields) = fields {
        objects.retain(|object| scope.selects(&call.kind, object));
        memory = copies(call, &objects)?;
        objects = version_fields::select(&call.kind, &fields, objects).await?;
    }
    let limit = call.info.query.page_limit();
    let mut page: Vec<Arc<Object>> = Vec::new();
    let mut meta = json!({"resourceVersion": revision.to_string()});
    let mut candidates = objects.into_iter();
    for object in candidates.by_ref() {
        if !scope.selects(&call.kind, &object) {
            continue;
        }
        if page.len() == limit {
            let next = Continue { rv: revision, start: object.key.to_string(), issued };
            meta["continue"] = next.encode()?.into();
            if scope.is_plain() {
                meta["remainingItemCount"] = (candidates.len() + 1).into();
            }
            break;
        }
        page.push(object);
    }
    if !is_converted {
        memory = copies(call, &page)?;
    }
    let mut page = convert::objects(&call.kind, page).await?;
    let form = call.form()?;
    if matches!(form, Form::Table(_)) && call.kind.is("flowcontrol.apiserver.k8s.io", "FlowSchema") {
        sort_by_precedence(&mut page);
    }
    Ok(reply::list(form, call.kind.clone(), page, memory, meta).await)
}

/// Reserves memory for the copies of objects in the version of the call.
pub(crate) fn copies<'a>(
    call: &Call,
    objects: impl IntoIterator<Item = &'a Arc<Object>>,
) -> Result<BodyMemory> {
    let bytes = convert::copied_bytes(&call.kind, objects);
    call.state.in_flight.copies(&call.user.name, bytes)
}

/// Sorts flow schemas by the order in which requests are compared with them. Source: `printFlowSchemaList`.
fn sort_by_precedence(schemas: &mut [Arc<Object>]) {
    schemas.sort_by_cached_key(|schema| {
        let schema = schema.value();
        let name = schema["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        (schema["spec"]["matchingPrecedence"].as_i64().unwrap_or(0), name)
    });
}

/// Whether a list with a revision returns exactly that revision. Without `resourceVersionMatch` this holds for a list
/// with a `limit`. Source: `ShouldDelegateList` of the cacher.
fn is_exact(query: &Query) -> bool {
    match query.get("resourceVersionMatch") {
        "Exact" => true,
        "" => query.get("resourceVersion") != "0" && query.page_limit() != usize::MAX,
        _ => false,
    }
}

/// The scope of a list or watch, from the path and the query.
pub(crate) fn scope(call: &Call) -> Result<Scope> {
    scope_of(call, &call.kind)
}

/// The scope of a list or watch, like [`scope`], for a kind that may differ from the kind of the call.
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
    let initialized_only = call.has_initializers() && !call.includes_uninitialized();
    Ok(Scope { prefix: prefix_of(kind, call.namespace()), labels, fields, initialized_only })
}

/// The objects of the collection, or of the page that the request's options select, in their current state. The page
/// may be of an earlier revision, so its objects may no longer match the selectors. An authorizer may permit a deletion
/// because of its selectors: the caller must compare them with the current objects.
pub(crate) fn chosen(call: &Call, scope: &Scope) -> Result<Vec<Arc<Object>>> {
    list_options::check(call, false)?;
    let (found, _) = snapshot(call, scope, token(call)?)?;
    let collection = call.state.cache.of(&call.kind)?;
    let objects = collection.lock();
    Ok(found.into_iter().filter_map(|object| objects.get(&object.key)).collect())
}

/// The objects under the scope's prefix from the start of the page, and the revision of that state. If the list has
/// further pages, the cache keeps this state for them.
fn snapshot(call: &Call, scope: &Scope, earlier: Option<Continue>) -> Result<(Vec<Arc<Object>>, u64)> {
    let cache = &call.state.cache;
    let collection = cache.of(&call.kind)?;
    let mut objects = collection.lock();
    let (found, revision) = found(call, scope, earlier, &objects)?;
    // The later pages of a deletion are at the newest revision.
    if call.info.verb == "list" && found.len() > call.info.query.page_limit() {
        cache.take_snapshot(&mut objects, &scope.prefix, revision, requester(&call.user.name));
    }
    Ok((found, revision))
}

/// The objects under the scope's prefix from the start of the page, and the revision of that state.
fn found(
    call: &Call,
    scope: &Scope,
    earlier: Option<Continue>,
    objects: &Collection,
) -> Result<(Vec<Arc<Object>>, u64)> {
    let (query, cache) = (&call.info.query, &call.state.cache);
    let newest = cache.revision().max(objects.newest());
    let named = single_key(call, scope).map(|key| objects.find(&key)).transpose()?;
    if named.is_none() {
        let complete = objects.check_complete(&scope.prefix);
        // With the feature gate for unsafe deletions the error names the objects, as upstream.
        complete.map_err(|error| match call.state.features.unsafe_deletion {
            true => objects.store_read_error(&scope.prefix),
            false => error,
        })?;
    }
    if let Some(token) = earlier {
        let (found, revision) = match token.rv {
            0 => (objects.candidates(scope), newest),
            // Only a forged token, or a token of another server with later commits, has such a revision. Source:
            // `waitAndListExactRV`.
            asked if asked > newest => return Err(ApiError::future_revision(asked, newest)),
            _ if token.is_expired(now()) => return Err(ApiError::expired_list(token.inconsistent()?)),
            rv => match objects.under_at(&scope.prefix, &token.start, rv) {
                Ok(found) => (found, rv),
                Err(_expired) => return Err(ApiError::expired_list(token.inconsistent()?)),
            },
        };
        let rest = found.into_iter().filter(|object| *object.key >= *token.start);
        return Ok((rest.collect(), revision));
    }
    match parse_revision(query.get("resourceVersion"))? {
        Some(asked) if asked > newest => return Err(ApiError::future_revision(asked, newest)),
        Some(asked) if is_exact(query) => {
            return Ok((objects.under_at(&scope.prefix, "", asked)?, asked));
        }
        _ => {}
    }
    let found = named.map_or_else(|| objects.candidates(scope), |named| named.into_iter().collect());
    Ok((found, newest))
}

/// The key of the only object that a selector for one name can select. Other objects are not read. `None` for other
/// selectors.
pub(crate) fn single_key(call: &Call, scope: &Scope) -> Option<String> {
    let name = scope.fields.exact_name().filter(|_| !scope.prefix.ends_with("//") && is_single(call))?;
    Some(format!("{}{name}", scope.prefix))
}

/// Whether a name alone identifies the object: the kind is cluster-scoped, or the request has a namespace.
fn is_single(call: &Call) -> bool {
    !call.kind.namespaced || !call.namespace().is_empty()
}

/// The token of the query.
fn token(call: &Call) -> Result<Option<Continue>> {
    let query = &call.info.query;
    let token = match query.get("continue") {
        "" => return Ok(None),
        text => Continue::decode(text)?,
    };
    if !matches!(query.get("resourceVersion"), "" | "0") {
        return Err(ApiError::bad_request("specifying resource version is not allowed when using continue"));
    }
    Ok(Some(token))
}

/// The token of the page that starts at an object, at the newest revision.
pub(crate) fn token_from(object: &Object) -> Result<String> {
    Continue { rv: 0, start: object.key.to_string(), issued: 0 }.encode()
}

/// The current time in seconds since 1970.
fn now() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0)
}

// === impl Continue ===

impl Continue {
    fn decode(text: &str) -> Result<Self> {
        let wrong = |why: String| {
            ApiError::bad_request(format!("invalid continue token: continue key is not valid: {why}"))
        };
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|error| wrong(error.to_string()))?;
        serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))
    }

    fn encode(&self) -> Result<String> {
        let bytes = serde_json::to_vec(self).map_err(ApiError::internal)?;
        Ok(BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }

    fn is_expired(&self, now: u64) -> bool {
        now.saturating_sub(self.issued) > TOKEN_LIFETIME_SECONDS
    }

    /// The token for the same position at the newest revision.
    fn inconsistent(&self) -> Result<String> {
        Self { rv: 0, start: self.start.clone(), issued: 0 }.encode()
    }
}

/// Continue tokens. A token that is accepted stays the same when it is encoded again.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(token) = Continue::decode(text) else { return };
    let again = token.encode().and_then(|text| Continue::decode(&text));
    assert!(again.is_ok_and(|again| again == token), "{text} is another token when it is encoded again");
    let _expired = token.is_expired(now());
    assert!(token.inconsistent().and_then(|text| Continue::decode(&text)).is_ok_and(|next| next.rv == 0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_token_is_replaced_by_one_of_the_newest_revision() {
        let token = Continue { rv: 7, start: "/pods/a".to_owned(), issued: 1000 };
        assert_eq!(Continue::decode(&token.encode().unwrap()).unwrap(), token);
        assert!(
            !token.is_expired(1000 + TOKEN_LIFETIME_SECONDS)
                && token.is_expired(1001 + TOKEN_LIFETIME_SECONDS)
        );
        // The clock was set back.
        assert!(!token.is_expired(1));
        let next = Continue::decode(&token.inconsistent().unwrap()).unwrap();
        assert_eq!((next.rv, &*next.start), (0, "/pods/a"));
        assert_eq!(Continue::decode("e30").unwrap_err().code, 400);
    }

    #[test]
    fn a_list_at_any_revision_has_no_limit() {
        let of = |query: &str| Query::parse(query).page_limit();
        assert_eq!(of("limit=3"), 3);
        assert_eq!(of("limit=3&resourceVersion=7"), 3);
        assert_eq!(of("limit=3&resourceVersion=0"), usize::MAX);
        assert_eq!(of("limit=3&resourceVersion=0&continue=x"), 3);
        assert_eq!(of("limit=0"), usize::MAX);
        let exact = |query: &str| is_exact(&Query::parse(query));
        assert!(exact("resourceVersion=7&resourceVersionMatch=Exact") && exact("resourceVersion=7&limit=3"));
        assert!(!exact("resourceVersion=7") && !exact("resourceVersion=0&limit=3"));
        assert!(!exact("resourceVersion=7&resourceVersionMatch=NotOlderThan&limit=3"));
    }
}
