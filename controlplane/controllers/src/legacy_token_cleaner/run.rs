//! Marks and deletes Secrets. A key of the queue is a namespace: its pods are listed once for all Secrets that are due.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{ListParams, Request};
use serde::Deserialize;
use serde_json::{Value, json};

use super::plan::{Action, INVALID_SINCE, after_day, day, is_generated, next, secrets_of};
use crate::account_token::plan::account_name;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Secret};
use crate::queue::{Next, Queue, until};
use crate::write::{Part, if_unchanged};

/// Delay before a Secret that is due but in use is checked again, and minimum delay after a change. Upstream has the
/// same interval. A user who removes the mark of a Secret has this time to use the token.
const RECHECK: Duration = Duration::from_secs(24 * 3600);
/// Pods in one page of a list.
const PAGE: u32 = 100;
/// ConfigMap with the first day on which the API server recorded the uses of tokens.
const TRACKING: &str = "kube-apiserver-legacy-service-account-token-tracking";

/// Queues the namespace of each Secret at the time when the Secret is due.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let (own, period) = (queue.clone(), context.config.token_clean_up_period);
    context.caches.account_tokens.on_change(move |change| {
        let Some(secret) = change.new else { return };
        let due = next(secret, period);
        let is_same = change.old.is_some_and(|old| next(old, period) == due);
        let Some((_, due)) = due.filter(|_| !is_same) else { return };
        let wait = until(due, Timestamp::now()).unwrap_or_default();
        let wait = if change.old.is_some() { wait.max(RECHECK) } else { wait };
        own.add_after(Key::new("", secret.namespace()), wait);
    });
    let own = queue.clone();
    context.caches.service_accounts.on_change(move |change| {
        let Some(account) = change.new.filter(|account| account.secrets.is_some()) else { return };
        if change.old.is_none_or(|old| old.secrets != account.secrets) {
            own.add_after(Key::new("", account.namespace()), RECHECK);
        }
    });
}

/// Reconciles the Secrets of one namespace.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let (now, period) = (Timestamp::now(), context.config.token_clean_up_period);
    let accounts = &context.caches.service_accounts;
    let planned = context.caches.account_tokens.in_namespace(&key.name).into_iter().filter_map(|secret| {
        let account = accounts.get(&Key::new(&key.name, account_name(&secret)?));
        let (action, due) = next(&secret, period).filter(|_| is_generated(&secret, account.as_deref()))?;
        Some((secret, action, due))
    });
    let (due, later): (Vec<_>, Vec<_>) = planned.partition(|(_, _, due)| *due <= now);
    let first = later.into_iter().filter_map(|(_, _, due)| until(due, now)).min();
    if due.is_empty() {
        return Ok(first.map_or(Next::Wait, Next::After));
    }
    // Without recorded uses, a token without the label may have been used.
    let recorded = recorded_since(context, period).await?;
    if let Some(wait) = recorded.map_or(Some(RECHECK), |since| until(since, now)) {
        return Ok(Next::After(wait));
    }
    let used = used_secrets(context, &key.name).await?;
    for (secret, action, _) in due.iter().filter(|(secret, ..)| !used.contains(secret.name())) {
        match action {
            Action::Invalidate => invalidate(context, secret, now).await?,
            Action::Delete => delete(context, secret).await?,
        }
    }
    Ok(Next::After(first.unwrap_or(RECHECK).min(RECHECK)))
}

/// The time at which the recording of uses covers a whole period. `None` if the start of the recording is unknown.
async fn recorded_since(context: &Context, period: Duration) -> Result<Option<Timestamp>, Error> {
    let key = Key::new("kube-system", TRACKING);
    let map = context.writer(&context.caches.root_cas).live(&key).await?;
    let since = map.and_then(|map| after_day(map.data?.get("since")?, period));
    if since.is_none() {
        tracing::warn!(config_map = %key, "cannot clean up unused tokens: the first day of the recorded uses is unknown");
    }
    Ok(since)
}

/// Names of the Secrets to which the pods of a namespace refer.
async fn used_secrets(context: &Context, namespace: &str) -> Result<BTreeSet<String>, Error> {
    #[derive(Deserialize)]
    struct Page {
        metadata: PageMeta,
        items: Vec<Value>,
    }
    #[derive(Deserialize)]
    struct PageMeta {
        #[serde(default, rename = "continue")]
        rest: Option<String>,
    }
    let failed = |source| Error::Request { verb: "list", object: format!("pods of {namespace}"), source };
    let mut params = ListParams::default().limit(PAGE);
    let mut used = BTreeSet::new();
    loop {
        let url = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
        let request = url.list(&params).map_err(|error| failed(kube::Error::BuildRequest(error)))?;
        let page: Page = context.client.request(request).await.map_err(failed)?;
        used.extend(page.items.iter().flat_map(secrets_of).map(str::to_owned));
        match page.metadata.rest.filter(|rest| !rest.is_empty()) {
            Some(rest) => params = params.continue_token(&rest),
            None => return Ok(used),
        }
    }
}

/// Marks a Secret. The version is a precondition, so that a token that is used in the meantime stays valid.
async fn invalidate(context: &Context, secret: &Secret, now: Timestamp) -> Result<(), Error> {
    let key = secret.key();
    tracing::info!(secret = %key, "marking an unused token of a service account as invalid");
    let patch = json!({"metadata": {
        "uid": secret.uid(), "resourceVersion": secret.metadata.resource_version,
        "labels": {INVALID_SINCE: day(now)},
    }});
    context.writer(&context.caches.account_tokens).merge(&key, Part::Main, patch).await.map(drop)
}

async fn delete(context: &Context, secret: &Secret) -> Result<(), Error> {
    let key = secret.key();
    tracing::info!(secret = %key, "deleting an unused token of a service account");
    let writer = context.writer(&context.caches.account_tokens);
    let deleted = writer.delete(secret, if_unchanged(secret)).await;
    deleted.map_err(|source| Error::Request { verb: "delete", object: format!("Secret {key}"), source })
}

#[cfg(test)]
mod tests;
