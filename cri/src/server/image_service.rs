//! ImageService of CRI v1: passes each call to the image service of the runtime.

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use tonic::Request;

use super::transaction::{Answer, answer, measure_all};
use crate::list_stream::Streamed;
use crate::runtime::Runtime;

#[tonic::async_trait]
impl ImageService for Runtime {
    async fn list_images(&self, request: Request<cri::ListImagesRequest>) -> Answer<cri::ListImagesResponse> {
        answer(Ok(self.images.image_list(request.into_inner())))
    }

    type StreamImagesStream = Streamed<cri::StreamImagesResponse>;
    async fn stream_images(
        &self,
        request: Request<cri::StreamImagesRequest>,
    ) -> Answer<Self::StreamImagesStream> {
        answer(Ok(self.images.image_stream(request.into_inner())))
    }

    async fn image_status(
        &self,
        request: Request<cri::ImageStatusRequest>,
    ) -> Answer<cri::ImageStatusResponse> {
        answer(self.images.image_status(request.into_inner()))
    }

    async fn pull_image(&self, request: Request<cri::PullImageRequest>) -> Answer<cri::PullImageResponse> {
        answer(self.images.image_pull(request.into_inner()).await)
    }

    async fn remove_image(
        &self,
        request: Request<cri::RemoveImageRequest>,
    ) -> Answer<cri::RemoveImageResponse> {
        answer(self.images.image_remove(request.into_inner()).await)
    }

    async fn image_fs_info(
        &self,
        _request: Request<cri::ImageFsInfoRequest>,
    ) -> Answer<cri::ImageFsInfoResponse> {
        let images = self.images.clone();
        images.wait_for_removals().await;
        measure_all(move || Ok(images.filesystems())).await
    }
}
