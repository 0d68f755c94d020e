//! Writes tokens into Secrets, and deletes Secrets.

use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::api::DeleteParams;
use serde_json::{Map, Value, json};

use super::plan::{ACCOUNT_UID, Action, Missing, account_name, is_of, plan};
use crate::account_token_signer::Subject;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Secret, ServiceAccount};
use crate::queue::{Next, Queue};
use crate::queueing::{Selecting, queue_stored};
use crate::write::Part;

/// Queues changed Secrets, and the Secrets of created and deleted service accounts.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.account_tokens, queue);
    let is_of_account =
        |secret: &Secret, account: &ServiceAccount| account_name(secret) == Some(account.name());
    let secrets = Selecting::new(queue, &context.caches.account_tokens, is_of_account, |_| false);
    context.caches.service_accounts.on_change(move |change| {
        let Some(account) = change.latest() else { return };
        let same = change.old.zip(change.new).is_some_and(|(old, new)| {
            old.uid() == new.uid() && old.is_being_deleted() == new.is_being_deleted()
        });
        if !same {
            secrets.changed(account.namespace(), account);
        }
    });
}

/// Reconciles one Secret.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(secret) = context.caches.account_tokens.get(&key) else { return Ok(Next::Wait) };
    let Some(name) = account_name(&secret) else { return Ok(Next::Wait) };
    let account = account(context, &secret, &Key::new(&key.namespace, name)).await?;
    match plan(&secret, account.as_deref(), context.config.root_ca_pem.as_deref()) {
        Action::Nothing => {}
        Action::Delete => {
            tracing::info!(secret = %key, account = name, "deleting a token of a service account that does not exist");
            let failed = |source| Error::Request { verb: "delete", object: format!("Secret {key}"), source };
            let writer = context.writer(&context.caches.account_tokens);
            writer.delete(&secret, DeleteParams::default()).await.map_err(failed)?;
        }
        Action::Fill(missing) => {
            if let Some(patch) = account.and_then(|account| patch(context, &secret, &account, &missing)) {
                context.writer(&context.caches.account_tokens).merge(&key, Part::Main, patch).await?;
            }
        }
    }
    Ok(Next::Wait)
}

/// The service account. If the cache does not have the account, or has another account of that name, the account is
/// read from the API server. So no Secret is deleted by mistake.
async fn account(
    context: &Context,
    secret: &Secret,
    key: &Key,
) -> Result<Option<Arc<ServiceAccount>>, Error> {
    let cache = &context.caches.service_accounts;
    if let Some(known) = cache.get(key).filter(|known| is_of(secret, known)) {
        return Ok(Some(known));
    }
    Ok(context.writer(cache).live(key).await?.map(Arc::new))
}

/// A patch with the missing parts, for this version of the Secret only. `None` without a signing key.
fn patch(context: &Context, secret: &Secret, account: &ServiceAccount, missing: &[Missing]) -> Option<Value> {
    let (namespace, encode) = (secret.namespace(), |text: &str| Value::from(BASE64_STANDARD.encode(text)));
    let mut data = Map::new();
    if missing.contains(&Missing::Token) {
        let subject =
            Subject { namespace, secret: secret.name(), account: account.name(), account_uid: account.uid() };
        let token = context.config.account_tokens.as_ref()?.sign(&subject)?;
        data.insert("token".to_owned(), encode(&token));
    }
    if let Some(ca) = context.config.root_ca_pem.as_deref().filter(|_| missing.contains(&Missing::Ca)) {
        data.insert("ca.crt".to_owned(), encode(ca));
    }
    if missing.contains(&Missing::Namespace) {
        data.insert("namespace".to_owned(), encode(namespace));
    }
    Some(json!({
        "metadata": {
            "uid": secret.uid(), "resourceVersion": secret.metadata.resource_version,
            "annotations": {ACCOUNT_UID: account.uid()},
        },
        "data": data,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn very_many_secrets_are_compared_with_an_account_after_the_handler() {
        let api = TestApi::new(&[]);
        let (queue, caches) = (Arc::new(Queue::new()), &api.context.caches);
        let object = |name: &str, account: &str| {
            let annotations = json!({"kubernetes.io/service-account.name": account});
            json!({"metadata": {"namespace": "n", "name": name, "uid": name, "resourceVersion": "1",
                "annotations": annotations}})
        };
        for number in 0..100 {
            let secret = object(&format!("secret-{number}"), &format!("account-{number}"));
            caches.account_tokens.written(serde_json::from_value(secret).unwrap());
        }
        listen(&api.context, &queue);
        caches.service_accounts.written(serde_json::from_value(object("account-7", "")).unwrap());
        let (sender, mut queued) = tokio::sync::mpsc::unbounded_channel();
        let work = queue.work("test", |key: Key| {
            sender.send(key.name).unwrap();
            async { Ok(Next::Wait) }
        });
        let mut work = std::pin::pin!(work);
        assert!(futures::poll!(work.as_mut()).is_pending());
        assert!(queued.try_recv().is_err(), "no Secret is compared in the handler");
        let name = tokio::select! {
            () = work.as_mut() => unreachable!("work has no end"),
            name = queued.recv() => name.unwrap(),
        };
        assert_eq!(name, "secret-7");
    }
}
