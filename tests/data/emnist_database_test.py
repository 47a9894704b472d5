"""EMNIST by writer from TFF's database: read, downloaded, damaged."""

import io
import lzma
import socket
import sqlite3
import urllib.error

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.data import DataError, emnist, load

# Writers and numbers of their examples, by split.
SPLITS = {
    'digits_only_train': {'f_a': 3, 'f_b': 1, 'f_c': 1002},
    'digits_only_test': {'f_c': 2, 'f_a': 1},
    'all_train': {'f_a': 2, 'f_d': 2},
    'all_test': {'f_d': 1},
}


def make_example(pixels, label):
  return tf.train.Example(
      features=tf.train.Features(
          feature={
              'pixels': tf.train.Feature(
                  float_list=tf.train.FloatList(value=pixels)
              ),
              'label': tf.train.Feature(
                  int64_list=tf.train.Int64List(value=[label])
              ),
          }
      )
  ).SerializeToString()


def write_database(path, label_of=lambda k: k % 10):
  """TFF's tables. Example k has ink 1 - k / 2000 and the label k % 10."""
  path.parent.mkdir(parents=True, exist_ok=True)
  connection = sqlite3.connect(path)
  connection.execute(
      'CREATE TABLE examples'
      ' (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)'
  )
  connection.execute(
      'CREATE TABLE client_metadata'
      ' (client_id TEXT, split_name TEXT, num_examples INTEGER)'
  )
  for split, sizes in SPLITS.items():
    for client, size in sizes.items():
      connection.execute(
          'INSERT INTO client_metadata VALUES (?, ?, ?)', (client, split, size)
      )
      connection.executemany(
          'INSERT INTO examples VALUES (?, ?, ?)',
          [
              (split, client, make_example([k / 2000] * 784, label_of(k)))
              for k in range(size)
          ],
      )
  connection.commit()
  connection.close()


@pytest.fixture
def database(tmp_path, monkeypatch):
  """Where the database has to be; the expected sizes are those of `SPLITS`."""
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setattr(
      emnist, '_DATABASE_SIZES', {True: (1006, 3), False: (4, 1)}
  )
  return tmp_path / '.tff' / 'emnist_all.sqlite'


def test_database_of_digits(database):
  write_database(database)
  images = load('emnist')
  # In the order of ids: f_a, f_b, f_c.
  numbers = np.r_[0:3, 0:1, 0:1002]
  np.testing.assert_array_equal(images.train_labels, numbers % 10)
  np.testing.assert_array_equal(
      images.train_writers, np.repeat([0, 1, 2], [3, 1, 1002])
  )
  np.testing.assert_allclose(
      images.train_images,
      np.broadcast_to(1 - numbers[:, None, None] / 2000, (1006, 28, 28)),
      atol=1e-6,
  )
  np.testing.assert_array_equal(images.test_writers, [0, 2, 2])
  np.testing.assert_array_equal(images.test_labels, [0, 0, 1])
  assert images.num_classes == 10
  assert images.train_images.dtype == np.float32
  assert {images.train_labels.dtype, images.test_writers.dtype} == {
      np.dtype(np.int32)
  }


def test_database_with_letters(database):
  write_database(database, label_of=lambda k: 61 - k)
  images = load('emnist', only_digits=False)
  np.testing.assert_array_equal(images.train_labels, [61, 60, 61, 60])
  np.testing.assert_array_equal(images.train_writers, [0, 0, 1, 1])
  np.testing.assert_array_equal(images.test_writers, [1])
  assert images.num_classes == 62


def test_sizes_of_the_real_database():
  assert emnist._DATABASE_SIZES == {
      True: (341_873, 40_832),
      False: (671_585, 77_483),
  }


def assert_error(path, expected):
  with pytest.raises(DataError, match=expected) as raised:
    load('emnist')
  assert '\n' not in str(raised.value)
  assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ('sizes', 'expected'),
    [
        ((1007, 3), '1006 of 1007 examples'),
        ((1006, 4), '3 of 4 examples'),
        ((1005, 3), 'more than the 1005'),
    ],
)
def test_database_of_another_size(database, monkeypatch, sizes, expected):
  monkeypatch.setitem(emnist._DATABASE_SIZES, True, sizes)
  write_database(database)
  assert_error(database, f'{expected}.*delete it.*`data_dir`')


@pytest.mark.parametrize('share', [0.0, 0.01, 0.7])
def test_cut_database(database, share):
  write_database(database)
  content = database.read_bytes()
  database.write_bytes(content[: int(share * len(content))])
  assert_error(database, 'delete it and run again, or .*`data_dir` must')


def test_labels_of_the_database(database):
  write_database(database, label_of=lambda k: 10 + k)
  assert_error(database, 'label 10 at position 0 is outside of 0 to 9')


class Response(io.BytesIO):
  headers = {}


def serve(monkeypatch, content):
  timeouts = []

  def urlopen(url):
    timeouts.append(socket.getdefaulttimeout())
    assert url.endswith('emnist_all.sqlite.lzma')
    if isinstance(content, Exception):
      raise content
    return Response(content)

  monkeypatch.setattr('urllib.request.urlopen', urlopen)
  return timeouts


@pytest.fixture
def packed(tmp_path):
  path = tmp_path / 'elsewhere' / 'db'
  write_database(path)
  return lzma.compress(path.read_bytes())


def test_download_is_kept(database, packed, monkeypatch):
  timeouts = serve(monkeypatch, packed)
  assert len(load('emnist').train_labels) == 1006
  assert len(load('emnist').train_labels) == 1006
  [timeout] = timeouts
  assert 0 < timeout <= 30
  assert socket.getdefaulttimeout() is None
  assert list(database.parent.iterdir()) == [database]


def test_failed_downloads_leave_nothing_behind(database, packed, monkeypatch):
  for content in (
      urllib.error.URLError('no network'),
      TimeoutError(),
      packed[: len(packed) // 2],
      b'<html>Please log in</html>',
      b'',
  ):
    serve(monkeypatch, content)
    assert_error('', '`dataset`=emnist: the download failed.*`data_dir` must')
    assert not list(database.parent.iterdir())
  serve(monkeypatch, packed)
  assert len(load('emnist').train_labels) == 1006


def test_home_cannot_be_written(tmp_path, monkeypatch):
  # A file where a directory should be, since tests may run as root.
  home = tmp_path / 'file'
  home.touch()
  monkeypatch.setenv('HOME', str(home))
  assert_error(home, 'download failed')
