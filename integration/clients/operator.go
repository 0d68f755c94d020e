// An operator on the published controller-runtime. It uses leader election, adds a finalizer to each Bucket, creates a
// ConfigMap that the Bucket owns, and patches the status of the Bucket.
package main

import (
	"context"
	"flag"
	"os"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

const finalizer = "clients.example.com/go"

var kind = schema.GroupVersionKind{Group: "clients.example.com", Version: "v1", Kind: "Bucket"}

type reconciler struct{ client.Client }

func (r *reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	bucket := &unstructured.Unstructured{}
	bucket.SetGroupVersionKind(kind)
	if err := r.Get(ctx, request.NamespacedName, bucket); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	owned := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: request.Namespace, Name: request.Name + "-go"}}
	if !bucket.GetDeletionTimestamp().IsZero() {
		if err := r.Delete(ctx, owned); err != nil && !apierrors.IsNotFound(err) {
			return ctrl.Result{}, err
		}
		controllerutil.RemoveFinalizer(bucket, finalizer)
		return ctrl.Result{}, r.Update(ctx, bucket)
	}
	if controllerutil.AddFinalizer(bucket, finalizer) {
		if err := r.Update(ctx, bucket); err != nil {
			return ctrl.Result{}, err
		}
	}
	_, err := controllerutil.CreateOrUpdate(ctx, r, owned, func() error {
		size, _, _ := unstructured.NestedString(bucket.Object, "spec", "size")
		owned.Data = map[string]string{"size": size}
		return controllerutil.SetControllerReference(bucket, owned, r.Scheme())
	})
	if err != nil {
		return ctrl.Result{}, err
	}
	before := bucket.DeepCopy()
	if err := unstructured.SetNestedField(bucket.Object, owned.Data["size"], "status", "go"); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, r.Status().Patch(ctx, bucket, client.MergeFrom(before))
}

func run() error {
	options := ctrl.Options{
		LeaderElection: true, LeaderElectionID: "operator-go", LeaderElectionNamespace: "default",
		LeaderElectionReleaseOnCancel: true, Metrics: server.Options{BindAddress: "0"},
	}
	manager, err := ctrl.NewManager(ctrl.GetConfigOrDie(), options)
	if err != nil {
		return err
	}
	bucket := &unstructured.Unstructured{}
	bucket.SetGroupVersionKind(kind)
	builder := ctrl.NewControllerManagedBy(manager).For(bucket).Owns(&corev1.ConfigMap{})
	if err := builder.Complete(&reconciler{manager.GetClient()}); err != nil {
		return err
	}
	return manager.Start(ctrl.SetupSignalHandler())
}

func main() {
	flag.Parse()
	ctrl.SetLogger(zap.New())
	if err := run(); err != nil {
		ctrl.Log.Error(err, "the operator failed")
		os.Exit(1)
	}
}
