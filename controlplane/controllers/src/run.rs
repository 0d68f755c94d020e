//! Starts the selected controllers with their watches, queues and workers.

use std::future::Future;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use kube::Client;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::ControllersConfig;
use crate::context::Context;
use crate::device_taint_eviction::plan::Pools;
use crate::endpoint_slice_metrics::EndpointSliceMetrics;
use crate::error::Error;
use crate::node_lifecycle::state::Lifecycle;
use crate::object::Key;
use crate::queue::{Next, OwnQueue, Queue};
use crate::stateful_set_metrics::StatefulSetMetrics;
use crate::storage_version_migration::plan::Unfinished;
use crate::{
    account_token, address_pool, attributes_class_protection, bootstrap_signer, cluster_role_aggregation,
    cron_job, csr_approving, csr_cleaner, csr_signing, daemon_set, deployment, device_taint_eviction,
    disruption, endpoint_slice, endpoint_slice_mirroring, endpoints, ephemeral_volume, garbage, ip_address,
    job, job::orphan as job_orphan, legacy_token_cleaner, local_volume, namespace, node_balancer,
    node_lifecycle, node_ttl, pod_autoscaler, pod_cidr, pod_gc, pod_group_protection, replica_set,
    replication_controller, resource_claim, resource_claim::release as claim_release, resource_quota,
    root_ca, service_account, service_cidr, stale_disruption, stateful_set, storage_version_migration,
    taint_eviction, token_cleaner, ttl_after_finished, volume_binding, volume_protection,
    volume_protection::claim as claim_protection,
};

/// Removes the numbers of objects from the metrics when the controllers end, because the next leader then shows these
/// numbers.
struct ObjectMetrics {
    sets: StatefulSetMetrics,
    slices: EndpointSliceMetrics,
}

impl Drop for ObjectMetrics {
    fn drop(&mut self) {
        self.sets.forget_all();
        self.slices.forget_all();
    }
}

/// Runs the selected controllers until `shutdown` is cancelled. Failed watches are retried forever. Returns early if a
/// task ends by itself.
pub async fn run(client: Client, config: ControllersConfig, shutdown: CancellationToken) {
    // This value is dropped after the tasks, because the tasks set the numbers.
    let _metrics = ObjectMetrics {
        sets: config.stateful_set_metrics.clone(),
        slices: config.endpoint_slice_metrics.clone(),
    };
    let mut tasks = JoinSet::new();
    let (recorder, events) = coracle_events::recorder(client.clone(), "");
    tasks.spawn(events.run());
    let context = Arc::new(Context::new(client, recorder, config));
    let _running =
        context.config.selection.has("pod-cidr").then(|| context.config.running_controllers.begin());
    // The handlers of counts and indexes are registered first, so that the other handlers read their current state.
    endpoints::run::follow(&context);
    context.pod_counts.follow(&context.caches.pods);
    context.failed_pods.follow(&context.caches.pods);
    start(&context, &mut tasks);
    // Handlers are registered before the watches start, so that they get every object.
    for watch in context.caches.watches(&context.client) {
        tasks.spawn(watch);
    }
    // The return drops `tasks`, which ends every task at its next await point. Requests that were sent still take
    // effect.
    tokio::select! {
        () = shutdown.cancelled() => {}
        Some(ended) = tasks.join_next() => tracing::error!(?ended, "a controller's task has ended"),
    }
}

/// Starts the controllers that have a queue of keys. It is a macro, because the functions of each controller have
/// different types.
macro_rules! start {
    ($tasks:ident, $context:ident, $($controller:ident $name:literal $workers:literal,)*) => {$(
        if $context.config.selection.has($name) {
            let queue = Arc::new(Queue::shared($context.config.queue_metrics.of($name), $workers));
            $controller::run::listen($context, &queue);
            let pool = Pool { queue: &queue, controller: $name, workers: $workers };
            workers($tasks, $context, pool, |context, key| async move {
                $controller::run::reconcile(&context, key).await
            });
        }
    )*};
}

/// Starts the controllers that keep a state of their own between reconciles, beside the shared [`Context`].
macro_rules! start_with_state {
    ($tasks:ident, $context:ident, $($controller:ident<$state:ty> $name:literal $workers:literal,)*) => {$(
        if $context.config.selection.has($name) {
            let queue = Arc::new(Queue::measured($context.config.queue_metrics.of($name)));
            let state = Arc::<$state>::default();
            $controller::run::listen($context, &queue, &state);
            let pool = Pool { queue: &queue, controller: $name, workers: $workers };
            workers($tasks, $context, pool, move |context, key| {
                let state = state.clone();
                async move { $controller::run::reconcile(&context, &state, key).await }
            });
        }
    )*};
}

/// Starts the selected controllers. If a controller has several workers, the objects of one namespace use all of them
/// except one ([`Queue::shared`]).
fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    start! {
        tasks, context,
        deployment "deployment" 3,
        replica_set "replica-set" 5,
        replication_controller "replication-controller" 2,
        stateful_set "stateful-set" 3,
        daemon_set "daemon-set" 3,
        job "job" 5,
        job_orphan "job-orphan" 1,
        cron_job "cron-job" 3,
        ttl_after_finished "ttl-after-finished" 1,
        service_account "service-account" 1,
        root_ca "root-ca" 1,
        account_token "account-token" 1,
        pod_cidr "pod-cidr" 1,
        namespace "namespace" 2,
        endpoints "endpoints" 3,
        endpoint_slice "endpoint-slice" 3,
        endpoint_slice_mirroring "endpoint-slice-mirroring" 1,
        ip_address "ip-address" 2,
        service_cidr "service-cidr" 1,
        csr_signing "csr-signing" 1,
        csr_cleaner "csr-cleaner" 1,
        token_cleaner "token-cleaner" 1,
        legacy_token_cleaner "legacy-token-cleaner" 1,
        bootstrap_signer "bootstrap-signer" 1,
        disruption "disruption" 1,
        stale_disruption "stale-disruption" 1,
        cluster_role_aggregation "cluster-role-aggregation" 1,
        volume_binding "volume-binding" 1,
        local_volume "local-volume" 1,
        claim_protection "claim-protection" 1,
        volume_protection "volume-protection" 1,
        attributes_class_protection "attributes-class-protection" 1,
        ephemeral_volume "ephemeral-volume" 1,
        resource_claim "resource-claim" 1,
        claim_release "resource-claim-release" 1,
        pod_group_protection "pod-group-protection" 1,
        resource_quota "resource-quota" 1,
    }
    if context.config.selection.has("resource-quota") {
        tasks.spawn(context.caches.watch_of_quotas(&context.client));
    }
    if context.config.selection.has("garbage") {
        tasks.spawn(garbage::run::run(context.clone()));
    }
    start_with_own_state(context, tasks);
}

fn start_with_own_state(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    /// A server of metrics that does not respond keeps a worker busy, so one worker is left for other namespaces.
    const AUTOSCALER_WORKERS: usize = 3;
    start_with_state! {
        tasks, context,
        pod_gc<OwnQueue> "pod-gc" 1,
        csr_approving<OwnQueue> "csr-approving" 1,
        node_balancer<node_balancer::state::State> "node-balancer" 1,
        address_pool<address_pool::state::State> "address-pool" 1,
        node_ttl<Mutex<node_ttl::plan::ClusterSize>> "node-ttl" 1,
        storage_version_migration<Mutex<Unfinished>> "storage-version-migrator" 2,
        taint_eviction<taint_eviction::run::Pending> "taint-eviction" 2,
        device_taint_eviction<Mutex<Pools>> "device-taint-eviction" 1,
    }
    if context.config.selection.has("horizontal-pod-autoscaler") {
        let meter = context.config.queue_metrics.of("horizontal-pod-autoscaler");
        let queue = Arc::new(Queue::shared(meter, AUTOSCALER_WORKERS));
        let state = Arc::<pod_autoscaler::State>::default();
        pod_autoscaler::run::listen(context, &queue);
        let name = "horizontal-pod-autoscaler";
        let pool = Pool { queue: &queue, controller: name, workers: AUTOSCALER_WORKERS };
        workers(tasks, context, pool, move |context, key| {
            let state = state.clone();
            async move { pod_autoscaler::run::reconcile(&context, &state, key).await }
        });
    }
    if context.config.selection.has("node-lifecycle") {
        let lifecycle = Arc::new(Lifecycle::new(context.config.queue_metrics.of("node-lifecycle")));
        node_lifecycle::run::listen(context, &lifecycle);
        let queue = lifecycle.queue.clone();
        let pool = Pool { queue: &queue, controller: "node-lifecycle", workers: 1 };
        workers(tasks, context, pool, move |context, key| {
            let lifecycle = lifecycle.clone();
            async move { node_lifecycle::run::reconcile(&context, &lifecycle, key).await }
        });
    }
}

/// The workers of one controller.
struct Pool<'a> {
    queue: &'a Arc<Queue<Key>>,
    controller: &'static str,
    workers: usize,
}

/// Reconciles one key. The future is boxed, so that the workers' loop is compiled once for all controllers.
type Reconcile = dyn Fn(Arc<Context>, Key) -> BoxFuture<'static, Result<Next, Error>> + Send + Sync;

/// Spawns the workers of one queue. They start when every cache has received its first list.
fn workers<F, R>(tasks: &mut JoinSet<()>, context: &Arc<Context>, pool: Pool<'_>, reconcile: F)
where
    F: Fn(Arc<Context>, Key) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Next, Error>> + Send + 'static,
{
    let boxed = move |context: Arc<Context>, key: Key| -> BoxFuture<'static, Result<Next, Error>> {
        Box::pin(reconcile(context, key))
    };
    spawn_workers(tasks, context, &pool, &(Arc::new(boxed) as Arc<Reconcile>));
}

fn spawn_workers(
    tasks: &mut JoinSet<()>,
    context: &Arc<Context>,
    pool: &Pool<'_>,
    reconcile: &Arc<Reconcile>,
) {
    let name = pool.controller;
    for _ in 0..pool.workers {
        let (context, queue, reconcile) = (context.clone(), pool.queue.clone(), Arc::clone(reconcile));
        tasks.spawn(async move {
            context.caches.synced().await;
            context.caches.synced_of(name).await;
            queue.work(name, |key| reconcile(context.clone(), key)).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stateful_set_metrics::SetAvailability;

    #[test]
    fn controllers_that_have_ended_show_no_numbers_of_objects() {
        let (sets, slices) = (StatefulSetMetrics::default(), EndpointSliceMetrics::default());
        let metrics = ObjectMetrics { sets: sets.clone(), slices };
        sets.set(
            Key::new("n", "s"),
            SetAvailability { is_parallel: false, max_unavailable: 1, unavailable: 0 },
        );
        assert_ne!(sets.text(), "");
        drop(metrics);
        assert_eq!(sets.text(), "");
    }
}
