//! In another's name (`kubectl --as`): whoever may `impersonate` the user, and each group that is named.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::authorize_also;
use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    request::ResourceInfo,
};

const ACCOUNTS: &str = "system:serviceaccount:";

/// Who a request is in the name of: the caller itself, unless headers say otherwise.
pub(crate) fn user(cache: &Cache, user: User, headers: &HeaderMap) -> Result<User> {
    let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let mut others = headers.keys().map(HeaderName::as_str).filter(|name| name.starts_with("impersonate-"));
    if let Some(other) = others.find(|name| !matches!(*name, "impersonate-user" | "impersonate-group")) {
        return Err(ApiError::bad_request(format!("the header {other} is not supported")));
    }
    let Some(name) = headers.get("impersonate-user").map(text) else {
        let alone = headers.contains_key("impersonate-group");
        let why = "groups are impersonated without a user";
        return if alone { Err(ApiError::bad_request(why)) } else { Ok(user) };
    };
    let mut groups: Vec<String> = headers.get_all("impersonate-group").iter().map(text).collect();
    let account = name.strip_prefix(ACCOUNTS).and_then(|rest| rest.split_once(':'));
    match account {
        Some((namespace, account)) => may(cache, &user, ("serviceaccounts", namespace, account))?,
        None => may(cache, &user, ("users", "", &name))?,
    }
    for group in &groups {
        may(cache, &user, ("groups", "", group))?;
    }
    if let (Some((namespace, _)), true) = (account, groups.is_empty()) {
        groups = vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
    }
    if name == "system:anonymous" {
        groups.push("system:unauthenticated".to_owned());
        return Ok(User { name, groups, ..User::default() });
    }
    Ok(User::new(&name, &groups.iter().map(String::as_str).collect::<Vec<_>>()))
}

fn may(cache: &Cache, user: &User, (resource, namespace, name): (&str, &str, &str)) -> Result<()> {
    let resource = ResourceInfo {
        version: "v1".to_owned(),
        namespace: namespace.to_owned(),
        resource: resource.to_owned(),
        name: name.to_owned(),
        ..ResourceInfo::default()
    };
    authorize_also(cache, user, "impersonate", resource)
}
