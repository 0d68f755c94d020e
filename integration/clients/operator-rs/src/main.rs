//! An operator on the published kube-rs. It copies the size of each Bucket into its status, and uses a finalizer.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    core::{DynamicObject, GroupVersionKind},
    discovery::ApiResource,
    runtime::{
        controller::{Action, Controller},
        finalizer::{self, Event},
        watcher,
    },
};
use serde_json::json;

const FINALIZER: &str = "clients.example.com/rust";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Finalizer(#[from] Box<finalizer::Error<kube::Error>>),
}

fn resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("clients.example.com", "v1", "Bucket"))
}

async fn reconcile(bucket: Arc<DynamicObject>, client: Arc<Client>) -> Result<Action, Error> {
    let namespace = bucket.metadata.namespace.clone().unwrap_or_default();
    let buckets: Api<DynamicObject> = Api::namespaced_with((*client).clone(), &namespace, &resource());
    let done = finalizer::finalizer(&buckets, FINALIZER, bucket, |event| async {
        if let Event::Apply(bucket) = event {
            let name = bucket.metadata.name.clone().unwrap_or_default();
            let status = json!({"apiVersion": "clients.example.com/v1", "kind": "Bucket",
                "status": {"rust": bucket.data["spec"]["size"]}});
            let params = PatchParams::apply("operator-rs").force();
            buckets.patch_status(&name, &params, &Patch::Apply(status)).await?;
        }
        Ok(Action::await_change())
    });
    done.await.map_err(|error| Error::Finalizer(Box::new(error)))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let client = Client::try_default().await?;
    let buckets: Api<DynamicObject> = Api::all_with(client.clone(), &resource());
    Controller::new_with(buckets, watcher::Config::default(), resource())
        .shutdown_on_signal()
        .run(
            reconcile,
            |_, error, _| {
                eprintln!("{error}");
                Action::requeue(Duration::from_secs(1))
            },
            Arc::new(client),
        )
        .for_each(|_| std::future::ready(()))
        .await;
    Ok(())
}
