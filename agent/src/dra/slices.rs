//! Deletion of the node's ResourceSlices whose drivers are gone.

use std::sync::Arc;

use coracle_error_chain::chain;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};

use super::drivers::{Drivers, Scope};

/// Deletes slices when they are due, until dropped.
pub(super) async fn run(client: Client, node: String, drivers: Arc<Drivers>) {
    let slices: Api<ResourceSlice> = Api::all(client);
    loop {
        let wipe = drivers.next_wipe().await;
        let selected = ListParams::default().fields(&selector(&node, &wipe.scope));
        match slices.delete_collection(&DeleteParams::default(), &selected).await {
            Ok(_) => tracing::debug!(scope = ?wipe.scope, "deleted the slices of drivers"),
            // The control plane has no slices of this version.
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(kube::Error::Api(status)) if status.is_forbidden() => {
                tracing::warn!(error = status.message, "the node may not delete its ResourceSlices");
            }
            Err(error) => {
                tracing::debug!(error = chain(&error), scope = ?wipe.scope, "cannot delete the slices of drivers");
                drivers.repeat(wipe);
            }
        }
    }
}

fn selector(node: &str, scope: &Scope) -> String {
    match scope {
        Scope::All => format!("spec.nodeName={node}"),
        Scope::Driver(driver) => format!("spec.driver={driver},spec.nodeName={node}"),
    }
}
