//! Impersonation (`kubectl --as`). The user, each group, the uid and each extra value need a permission. The mode
//! determines the permission (`impersonation/mode.rs`).
//!
//! Source: `k8s.io/apiserver/pkg/endpoints/filters/impersonation`.

mod counts;
mod mode;

use std::collections::BTreeMap;
use std::time::Instant;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{
    authn::User,
    error::{ApiError, Result},
};
pub(crate) use counts::{Counted, ImpersonationCounts};
use mode::Mode;
pub(crate) use mode::{Caller, node_of_account};

const EXTRA: &str = "impersonate-extra-";
const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";

/// A user that a request impersonates.
pub(crate) struct Impersonated {
    pub(crate) user: User,
    /// The verb that allows the impersonation, for audit events. Empty for the verb `impersonate`.
    pub(crate) constraint: &'static str,
}

/// The user that the headers name. `None` without impersonation: the caller sends the request for itself.
///
/// # Errors
/// The headers are invalid, or no mode allows the impersonation. If no mode allows it, the error of the first mode is
/// returned, as upstream.
pub(crate) async fn impersonated(caller: &Caller<'_>, headers: &HeaderMap) -> Result<Option<Impersonated>> {
    let wanted = wanted(headers)?;
    if wanted.name.is_empty() {
        let alone = !wanted.groups.is_empty() || !wanted.uid.is_empty() || !wanted.extra.is_empty();
        let why = "groups, uid or extra values are impersonated without a user";
        return if alone { Err(ApiError::bad_request(why)) } else { Ok(None) };
    }
    let began = Instant::now();
    let impersonated = try_modes(caller, &wanted).await;
    let mode = impersonated.as_ref().map_or("", |(mode, _)| mode.name());
    caller.counts.attempts.add(mode, impersonated.is_ok(), began.elapsed());
    let (mode, mut user) = impersonated?;
    complete_groups(&mut user);
    Ok(Some(Impersonated { user, constraint: mode.constraint() }))
}

/// The first mode that allows the impersonation, and the user with the groups that the mode implies.
async fn try_modes(caller: &Caller<'_>, wanted: &User) -> Result<(Mode, User)> {
    let mut first = None;
    for mode in Mode::ALL.into_iter().filter(|mode| mode.supports(wanted, caller)) {
        match mode.impersonate(caller, wanted).await {
            Ok(user) => return Ok((mode, user)),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first.unwrap_or_else(|| ApiError::forbidden("the user cannot be impersonated")))
}

/// The user in the headers. Its name is empty without these headers.
fn wanted(headers: &HeaderMap) -> Result<User> {
    let mut user = User::default();
    let names = headers.keys().map(HeaderName::as_str).filter(|name| name.starts_with("impersonate-"));
    for name in names {
        let values = headers.get_all(name).iter().map(text).collect::<Result<Vec<_>>>()?;
        match name {
            "impersonate-user" => user.name = single(name, values)?,
            "impersonate-uid" => user.uid = single(name, values)?,
            "impersonate-group" => user.groups = values,
            _ => match name.strip_prefix(EXTRA).filter(|key| !key.is_empty()) {
                Some(key) => extra(&mut user.extra, key).extend(values),
                None => return Err(ApiError::bad_request(format!("the header {name} is not supported"))),
            },
        }
    }
    Ok(user)
}

fn text(value: &HeaderValue) -> Result<String> {
    let text = value.to_str().map(str::to_owned);
    text.map_err(|_not_ascii| ApiError::bad_request("an impersonation header is not plain text"))
}

fn single(name: &str, values: Vec<String>) -> Result<String> {
    match <[String; 1]>::try_from(values) {
        Ok([value]) => Ok(value),
        Err(_several) => Err(ApiError::bad_request(format!("the header {name} is given more than once"))),
    }
}

/// The values of an extra key. Keys are percent-encoded, because header names allow fewer characters.
fn extra<'a>(all: &'a mut BTreeMap<String, Vec<String>>, key: &str) -> &'a mut Vec<String> {
    let decoded = percent_encoding::percent_decode_str(key).decode_utf8();
    let decoded = decoded.map_or_else(|_not_utf8| key.to_owned(), std::borrow::Cow::into_owned);
    all.entry(decoded.to_lowercase()).or_default()
}

/// Adds the group system:authenticated, unless the headers contain system:unauthenticated. The anonymous user gets
/// system:unauthenticated.
fn complete_groups(user: &mut User) {
    let group = match user.name.as_str() {
        "system:anonymous" => UNAUTHENTICATED,
        _ if user.is_in(UNAUTHENTICATED) => return,
        _ => AUTHENTICATED,
    };
    if !user.is_in(group) {
        user.groups.push(group.to_owned());
    }
}
