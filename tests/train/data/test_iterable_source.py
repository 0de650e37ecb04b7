from __future__ import annotations

import numpy as np
import pytest
from sample_sources import Stream
from torch.utils.data import IterableDataset

from toolkit.errors import ToolkitError
from toolkit.train.data import IterableSource, Loader, LoaderSettings


def test_a_resume_says_how_many_samples_are_read_and_dropped():
    said = []
    source = IterableSource(Stream(), tell=said.append)
    assert source.take(np.arange(40, 44)).tolist() == [11, 12, 13, 14]
    assert [text[: text.index(" (")] for text in said] == [
        "read and dropped 40 samples of the stream to reach sample 40"
    ]
    source.take(np.arange(48, 52))
    assert len(said) == 1, "what is the other ranks' is no news"


def test_going_back_begins_at_the_epoch_once_its_length_is_known():
    pulled = []

    class Counted(IterableDataset):
        def __iter__(self):
            for number in range(10):
                pulled.append(number)
                yield number

    source = IterableSource(Counted(), tell=lambda text: None)
    source.take(np.arange(35, 37))
    pulled.clear()
    assert source.take(np.arange(31, 33)).tolist() == [1, 2]
    assert pulled == [0, 1, 2]


def test_the_dataset_is_told_the_epoch():
    class Shuffled(IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(np.random.default_rng(self.epoch).permutation(10).tolist())

    read = IterableSource(Shuffled()).take(np.arange(30)).view(3, 10)
    assert [sorted(epoch) for epoch in read.tolist()] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in read.tolist()}) == 3
    assert IterableSource(Shuffled(), tell=lambda text: None).take(np.arange(20, 30)).tolist() == read[2].tolist()


def test_epochs_of_several_lengths_are_refused():
    class Growing(IterableDataset):
        def set_epoch(self, epoch):
            self.count = 3 + epoch

        def __iter__(self):
            return iter(range(self.count))

    with pytest.raises(ToolkitError, match="expected 3 samples as in the previous epoch, got 4"):
        IterableSource(Growing()).take(np.arange(9))


def test_an_empty_stream_and_one_that_breaks_off_are_named():
    with pytest.raises(ToolkitError, match="epoch 0 of Stream: the stream is empty"):
        IterableSource(Stream(0)).take(np.arange(1))

    class Short(IterableDataset):
        def __iter__(self):
            yield 0
            raise OSError("the server is gone")

    with pytest.raises(ToolkitError, match=r"sample 1 of Short: the stream failed: OSError: the server is gone"):
        IterableSource(Short(), broken="skip").take(np.arange(2))


def test_one_worker_is_enough_for_a_stream():
    said = []
    with Loader(IterableSource(Stream()), batch=4, seed=0, settings=LoaderSettings(3), tell=said.append) as loader:
        assert next(loader.batches()).tolist() == [0, 1, 2, 3]
        assert len(loader._ahead._processes) == 1
    assert said == ["this source supports at most 1 of the 3 requested workers"]
