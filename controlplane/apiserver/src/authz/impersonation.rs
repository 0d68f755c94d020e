//! Impersonation (`kubectl --as`). The user, each group, the uid and each extra value need the verb `impersonate`.
//!
//! Source: `k8s.io/apiserver/pkg/endpoints/filters/impersonation`.

use std::collections::BTreeMap;

use coracle_values::names::{dns1123_label, dns1123_subdomain};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::Authorizers;
use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    request::ResourceInfo,
};

const ACCOUNTS: &str = "system:serviceaccount:";
const EXTRA: &str = "impersonate-extra-";
/// Group of the resources `uids` and `userextras`.
const GROUP: &str = "authentication.k8s.io";
const AUTHENTICATED: &str = "system:authenticated";
const UNAUTHENTICATED: &str = "system:unauthenticated";

/// The user of a request: the impersonated user of the headers, or the caller.
pub(crate) async fn user(
    (authorizers, cache): (&Authorizers, &Cache),
    user: User,
    headers: &HeaderMap,
) -> Result<User> {
    let mut wanted = wanted(headers)?;
    if wanted.name.is_empty() {
        let alone = !wanted.groups.is_empty() || !wanted.uid.is_empty() || !wanted.extra.is_empty();
        let why = "groups, uid or extra values are impersonated without a user";
        return if alone { Err(ApiError::bad_request(why)) } else { Ok(user) };
    }
    let caller = Caller { authorizers, cache, user: &user };
    let account = account(&wanted.name);
    match account {
        Some((namespace, name)) => {
            let account = Target { resource: "serviceaccounts", namespace, name, ..Target::default() };
            caller.may(account).await?;
        }
        None => {
            caller.may(Target { resource: "users", name: &wanted.name, ..Target::default() }).await?;
        }
    }
    for group in &wanted.groups {
        caller.may(Target { resource: "groups", name: group, ..Target::default() }).await?;
    }
    for (key, values) in &wanted.extra {
        for value in values {
            let extra =
                Target { group: GROUP, resource: "userextras", subresource: key, ..Target::default() };
            caller.may(Target { name: value, ..extra }).await?;
        }
    }
    if !wanted.uid.is_empty() {
        let uid = Target { group: GROUP, resource: "uids", name: &wanted.uid, ..Target::default() };
        caller.may(uid).await?;
    }
    if let (Some((namespace, _)), true) = (account, wanted.groups.is_empty()) {
        wanted.groups =
            vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
    }
    complete_groups(&mut wanted);
    Ok(wanted)
}

/// Namespace and name of a service account's user name. Any other text, for example with an additional colon, is an
/// ordinary user name. Source: `SplitUsername` of `k8s.io/apiserver/pkg/authentication/serviceaccount`.
pub(crate) fn account(user: &str) -> Option<(&str, &str)> {
    let (namespace, name) = user.strip_prefix(ACCOUNTS)?.split_once(':')?;
    let is_valid = dns1123_label(namespace).is_empty() && dns1123_subdomain(name).is_empty();
    is_valid.then_some((namespace, name))
}

/// Whether the headers name a user to impersonate. The user may be the caller itself.
pub(crate) fn is_wanted(headers: &HeaderMap) -> bool {
    headers.contains_key("impersonate-user")
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

/// Adds the group system:authenticated or system:unauthenticated, unless the headers contain one of them.
fn complete_groups(user: &mut User) {
    if user.is_in(AUTHENTICATED) || user.is_in(UNAUTHENTICATED) {
        return;
    }
    let anonymous = user.name == "system:anonymous";
    user.groups.push(if anonymous { UNAUTHENTICATED } else { AUTHENTICATED }.to_owned());
}

/// The sender of the impersonation headers, and the services that decide on its permissions.
struct Caller<'a> {
    authorizers: &'a Authorizers,
    cache: &'a Cache,
    user: &'a User,
}

/// The target of an impersonation, as a resource of the API.
#[derive(Default)]
struct Target<'a> {
    group: &'a str,
    resource: &'a str,
    subresource: &'a str,
    namespace: &'a str,
    name: &'a str,
}

impl Caller<'_> {
    /// Checks the permission to impersonate the target.
    async fn may(&self, target: Target<'_>) -> Result<()> {
        let resource = ResourceInfo {
            group: target.group.to_owned(),
            version: "v1".to_owned(),
            namespace: target.namespace.to_owned(),
            resource: target.resource.to_owned(),
            subresource: target.subresource.to_owned(),
            name: target.name.to_owned(),
            ..ResourceInfo::default()
        };
        self.authorizers.authorize_also(self.cache, self.user, "impersonate", resource).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_form_names_a_service_account() {
        assert_eq!(account("system:serviceaccount:default:web"), Some(("default", "web")));
        assert_eq!(account("system:serviceaccount:default:web.v1"), Some(("default", "web.v1")));
        for other in ["a:b:c", "a:b:", "a.b:c", ":b", "a:", "a", "A:b", "a:b c"] {
            assert_eq!(account(&format!("system:serviceaccount:{other}")), None, "{other}");
        }
    }
}
