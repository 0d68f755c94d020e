//! Wires watches, queues and workers together.

use std::future::Future;
use std::sync::Arc;

use kube::Client;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::caches::Caches;
use crate::config::ControllersConfig;
use crate::context::Context;
use crate::error::Error;
use crate::object::Key;
use crate::queue::{Next, Queue};
use crate::{deployment, events, replica_set};

/// Runs every controller until `shutdown` is cancelled. Watches that fail are retried for ever.
pub async fn run(client: Client, config: ControllersConfig, shutdown: CancellationToken) {
    let mut tasks = JoinSet::new();
    let (recorder, writing) = events::recorder(client.clone());
    tasks.spawn(writing);
    let context = Arc::new(Context { client, caches: Caches::new(), recorder, config });
    start(&context, &mut tasks);
    // Listeners first, so that they are told of all that the watches bring.
    for watch in context.caches.watches(&context.client) {
        tasks.spawn(watch);
    }
    // Dropping the set ends every task at its next await; no write is undone by that.
    tokio::select! {
        () = shutdown.cancelled() => {}
        Some(ended) = tasks.join_next() => tracing::error!(?ended, "a controller's task has ended"),
    }
}

fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let queue = Arc::new(Queue::new());
    deployment::run::listen(context, &queue);
    workers(tasks, context, (&queue, "deployment", 2), |context, key| async move {
        deployment::run::reconcile(&context, key).await
    });
    let queue = Arc::new(Queue::new());
    replica_set::run::listen(context, &queue);
    workers(tasks, context, (&queue, "replica-set", 4), |context, key| async move {
        replica_set::run::reconcile(&context, key).await
    });
}

/// Spawns workers on one queue, which begin once every cache has its first list.
fn workers<F, R>(
    tasks: &mut JoinSet<()>,
    context: &Arc<Context>,
    (queue, name, count): (&Arc<Queue<Key>>, &'static str, usize),
    reconcile: F,
) where
    F: Fn(Arc<Context>, Key) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Result<Next, Error>> + Send + 'static,
{
    for _ in 0..count {
        let (context, queue, reconcile) = (context.clone(), queue.clone(), reconcile.clone());
        tasks.spawn(async move {
            context.caches.synced().await;
            queue.work(name, |key| reconcile(context.clone(), key)).await;
        });
    }
}
